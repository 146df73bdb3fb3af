"""DALI: where every expert's bytes lie and who computes it.

Policies take counts and costs, and return ids.
"""

import dali_gguf.kernels  # noqa: F401  says where Numba keeps compiled code, before any is made
