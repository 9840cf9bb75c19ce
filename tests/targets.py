"""Both kinds of target of a model, for tests that are not given one by a fixture."""


def fast_target(model, taps=()):
    """The fast target with few buckets, so that trees are padded; on a CPU its steps run uncaptured."""
    from deltatree.models import FastTarget, ReferenceTarget

    return FastTarget(ReferenceTarget(model, taps), context_length=2048, buckets=(1, 3, 9, 24, 70, 201))


def reference_target(model, taps=()):
    from deltatree.models import ReferenceTarget

    return ReferenceTarget(model, taps)
