from deltatree.cli import main

main()
