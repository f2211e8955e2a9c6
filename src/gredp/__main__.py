from gredp.cli import main

main()
