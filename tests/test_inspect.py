"""Bytes worked out from configs, against the arithmetic for the published shapes."""

from types import SimpleNamespace

import pytest
import torch

from deltatree.inspect import StateSizes, human, layer_counts, memory_here

QWEN_27B = dict(
    num_hidden_layers=64, full_attention_interval=4, hidden_size=5120, num_attention_heads=24, num_key_value_heads=4,
    head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4,
)  # fmt: skip
CODER_30B = dict(num_hidden_layers=48, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128)


def test_B19_the_27b_needs_150_megabytes_once_not_for_every_node():
    assert layer_counts(QWEN_27B) == {"linear_attention": 48, "full_attention": 16}
    sizes = StateSizes.of(QWEN_27B)
    assert sizes.copied_state_bytes_per_node == 48 * 48 * 128 * 128 * 4 == 150_994_944
    # the stash of the recurrence (k, u and the decay in float32) and the convolution inputs (bfloat16)
    assert sizes.stash_bytes_per_node == 48 * ((16 * 128 + 48 * 128 + 48) * 4 + (2 * 16 + 48) * 128 * 2)
    assert sizes.copied_state_bytes_per_node / sizes.stash_bytes_per_node > 50
    assert sizes.kv_bytes_per_token == 16 * 2 * 4 * 256 * 2


def test_an_attention_model_has_no_recurrent_state():
    sizes = StateSizes.of(CODER_30B)
    assert (sizes.state_bytes, sizes.stash_bytes_per_node) == (0, 0)
    assert sizes.kv_bytes_per_token == 48 * 2 * 4 * 128 * 2


def test_bytes_for_people():
    assert [human(n) for n in (12, 1536, 3 << 20, 150_994_944, 5 << 40)] == [
        "12 B", "1.5 KiB", "3.0 MiB", "144.0 MiB", "5.0 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize("integrated", [True, False])
def test_B58_memory_of_an_integrated_device_is_the_systems(monkeypatch, integrated):
    """3 GB "free" on the device, because the rest is page cache; 100 GB that the system would give."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(is_integrated=integrated))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 128 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a chip")
    monkeypatch.setattr("deltatree.inspect.available_system_bytes", lambda: 100 << 30)
    assert memory_here() == (
        "100.0 GiB of system memory available" if integrated else "3.0 GiB free of 128.0 GiB on a chip"
    )
