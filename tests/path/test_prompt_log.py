"""The log of prompts, which the writer keeps for all engines of a namespace."""

from __future__ import annotations

import numpy as np
import pytest
from support.keys import key, keys
from support.node_rig import NodesRig
from support.path_rig import PathRig, RigNode, key_of

from kvcascade.tiers.nvme.path.path_messages import MAX_CHAIN_HEADS, Chain, chain_of
from kvcascade.tiers.nvme.segments.arrays import MappedArrays
from kvcascade.tiers.nvme.segments.chains import CHAINS, HEAD_BYTES, cells_for, head_of
from kvcascade.tools.commands.prompt_chains import Chains

TOKENS = 16


def logged(rig: PathRig, node: RigNode) -> Chains:
    """The chains that a command reads."""
    assert node.welcome is not None
    folder = rig.roots[0] / node.welcome.folder / "state"
    cells = MappedArrays(rig.files, folder, None)(CHAINS, cells_for(node.welcome.slots), np.uint64)
    return Chains([cells.copy()])


def prompt(rig: PathRig, node: RigNode, numbers: list[int], fresh: int) -> None:
    rig.send(node.client, chain_of([key_of(n) for n in numbers], fresh, TOKENS))


def test_prompts_of_all_engines_are_in_one_log() -> None:
    rig = PathRig()
    one, two = RigNode(rig), RigNode(rig)
    prompt(rig, one, [1, 2, 3], 0)
    prompt(rig, two, [1, 2, 3, 4, 5], 3)
    chains = logged(rig, one)
    assert chains.up_to(head_of(key_of(5))) == ([head_of(key_of(n)) for n in (5, 4, 3, 2, 1)], True)
    assert chains.end_of(head_of(key_of(4))) == 4 * TOKENS
    rig.kill()
    rig.start()
    again = RigNode(rig)
    prompt(rig, again, [1, 2, 9], 2)
    chains = logged(rig, again)
    assert len(chains) == 6 and chains.parent_of(head_of(key_of(9))) == head_of(key_of(2))


def test_namespaces_have_logs_of_their_own() -> None:
    rig = PathRig(120)
    one, two = RigNode(rig), RigNode(rig, label="another")
    prompt(rig, one, [1, 2], 0)
    prompt(rig, two, [7], 0)
    assert (len(logged(rig, one)), len(logged(rig, two))) == (2, 1)


@pytest.mark.parametrize(
    "message",
    [
        Chain(b"x" * 9, 0, TOKENS),
        Chain(b"x" * HEAD_BYTES, 2, TOKENS),
        Chain(b"x" * HEAD_BYTES, -1, TOKENS),
        Chain(b"x" * HEAD_BYTES, 0, 0),
        Chain(b"x" * HEAD_BYTES, 0, 1 << 40),
        Chain(b"x" * HEAD_BYTES * (MAX_CHAIN_HEADS + 1), 0, TOKENS),
        Chain(b"", 0, TOKENS),
    ],
)
def test_messages_beyond_the_limits_are_ignored(message: Chain) -> None:
    rig = PathRig()
    node = RigNode(rig)
    rig.send(node.client, message)
    rig.step()
    assert len(logged(rig, node)) == 0


def test_long_prompts_are_cut_and_short_keys_filled() -> None:
    message = chain_of([b"k"] * (MAX_CHAIN_HEADS + 5), MAX_CHAIN_HEADS + 3, TOKENS)
    assert len(message.heads) == HEAD_BYTES * MAX_CHAIN_HEADS
    assert message.fresh == MAX_CHAIN_HEADS
    assert chain_of([b"k"], 0, TOKENS).heads == b"k".ljust(HEAD_BYTES, b"\0")


def test_a_node_passes_the_order_on_while_it_is_served() -> None:
    rig = NodesRig()
    node = rig.add()
    node.engine.tell(chain_of(keys(3), 0, TOKENS))
    rig.pump()
    (chain,) = (message for message in rig.twin.heard if isinstance(message, Chain))
    assert chain.heads[:HEAD_BYTES] == key(0)[:HEAD_BYTES]
    writer = rig.kill_writer()
    rig.pump()
    node.engine.tell(chain_of(keys(4), 0, TOKENS))
    rig.pump()
    rig.writer = writer.successor()
    node.tick(1.0)
    assert not any(isinstance(message, Chain) for message in rig.twin.heard), "it is lost"
