"""What runs on the other side of the sandbox: the zygote, its checkers and the programs. Standard library only.

These files are loaded by a bare interpreter that knows no package path, so they import each other by plain names and
nothing else of the project; `mapl_core.sandbox` starts them.
"""
