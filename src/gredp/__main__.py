from gredp.app.cli import main

main()
