"""A second module over the same weights, for whoever only reads them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def twin_of(module: nn.Module) -> Any:
    """A copy of the module that shares every parameter and buffer and owns none.

    It is in evaluation mode, wants no gradients, and has a configuration of its own, so whatever
    is set on it leaves the module as it is. Weights that are updated in place are the twin's, too.
    """
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
        for parameter in module.parameters()
    }
    shared |= {id(buffer): buffer for buffer in module.buffers()}
    return copy.deepcopy(module, shared).eval()
