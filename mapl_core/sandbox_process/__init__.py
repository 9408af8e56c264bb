"""What runs on the other side of the sandbox: the zygote, its checkers and the programs. Standard library only.

The bare interpreter that `mapl_core.sandbox` starts loads this folder as a package of its own, without the rest of the
project: its files import each other relatively, and nothing else but the standard library.
"""
