"""``lightning-moe verify``: a config's own model and data, under its layout and in one plain process, compared.

``command`` is what a user calls. It starts ``run`` in processes of their own, once for the layout and once for one
process; those leave what they saw in a temporary folder, which ``compare`` reads and ``report`` shows.
"""

from lightning_moe.verify.command import main

__all__ = ["main"]
