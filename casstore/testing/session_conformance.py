"""The session conformance suite: the guarantees that agents rely on, to be subclassed.

    class TestMine(SessionConformance):
        @pytest.fixture
        def make_engine(self) -> Iterator[EngineFactory]: ...

Each call of the factory returns a new, empty engine on the given clock, as in the engine contract.
A persistent engine subclasses ``PersistentSessionConformance`` and overrides ``reopen`` too; the
reopened engine must use the fixture ``clock``.

The guarantees, and the prefixes of the names of their tests:

=======================  ===================================  ============================
promise                  tests                                       module
=======================  ===================================  ============================
Binding                  ``test_binding_``                           session_commits
Atomic commit            ``test_atomic_commit_``                     session_commits
Head CAS                 ``test_head_cas_``                          session_commits
No-expectation commit    ``test_no_expectation_commit``              session_commits
Replay                   ``test_replay_``                            session_turns
Replay conflict          ``test_replay_conflict_``                   session_turns
Hash ignores             ``test_hash_ignores``                       session_turns
Lease exclusivity        ``test_lease_exclusivity_``                 session_leases
Fencing                  ``test_fencing_``                           session_leases
Renew                    ``test_renew_``                             session_leases
Release                  ``test_release_``                           session_leases
Commit needs lease       ``test_commit_needs_lease``                 session_leases
Graph append             ``test_graph_append_``                      session_graphs
Replace full             ``test_replace_full_``                      session_graphs
Full vs active path      ``test_full_vs_active_path``                session_graphs
Checkpoint refs          ``test_checkpoint_refs_``                   session_checkpoints
Missing component        ``test_missing_component_``                 session_checkpoints
Usage                    ``test_usage_``                             session_checkpoints
Enqueue idempotency      ``test_enqueue_idempotency_``               session_queue
Boundary gate            ``test_boundary_gate_``                     session_queue
Join and exclusive       ``test_join_``, ``test_exclusive_``         session_queue
Availability             ``test_availability_``                      session_queue
Claim fencing            ``test_claim_fencing_``                     session_queue
Exact claim              ``test_exact_claim_``                       session_queue
Cancel                   ``test_cancel_``                            session_queue
Pending list             ``test_pending_list_``                      session_queue
Attachment WAL           ``test_attachment_wal_``                    session_attachments
Tombstone                ``test_tombstone``                          session_tombstones
Factory                  ``test_factory_``                           session_catalogue, _deletion
Picker                   ``test_picker_``                            session_picker
Reopen                   ``test_reopen_``, ``test_a_second_handle``  session_reopen
=======================  ===================================  ============================

In addition, ``test_fault_NN_`` shows that a known fault of earlier systems is absent,
``test_history_``, ``test_labels_``, ``test_rewind_`` and ``test_wait_`` are in session_history,
``test_fork_`` in session_forks, ``test_adopt_`` in session_adoption, ``test_compare_``,
``test_tags_`` and ``test_pins_`` in session_compare, ``test_nodes_`` in session_nodes,
``test_subjects_``, ``test_expiry_`` and ``test_protection_`` in session_lifetimes. session_races
tests the same guarantees while another writer writes between the read and the write of a call.
session_model runs random steps on sessions and on a model of plain dictionaries.

Tested elsewhere: garbage collection, its reports and the vacuuming of tombstones (the maintenance
suite); the refusal of other format versions and the reported durability (the tests of the store).
"""

from __future__ import annotations

import pytest

# Unless modules are registered before their import, a failing assert does not show its values.
pytest.register_assert_rewrite(
    "casstore.testing.session_fixtures",
    "casstore.testing.session_commits",
    "casstore.testing.session_turns",
    "casstore.testing.session_leases",
    "casstore.testing.session_graphs",
    "casstore.testing.session_nodes",
    "casstore.testing.session_checkpoints",
    "casstore.testing.session_queue",
    "casstore.testing.session_attachments",
    "casstore.testing.session_tombstones",
    "casstore.testing.session_history",
    "casstore.testing.session_forks",
    "casstore.testing.session_adoption",
    "casstore.testing.session_compare",
    "casstore.testing.session_catalogue",
    "casstore.testing.session_picker",
    "casstore.testing.session_deletion",
    "casstore.testing.session_lifetimes",
    "casstore.testing.session_races",
    "casstore.testing.session_model",
    "casstore.testing.session_reopen",
)

from casstore.testing.session_adoption import AdoptionConformance  # noqa: E402
from casstore.testing.session_attachments import AttachmentConformance  # noqa: E402
from casstore.testing.session_catalogue import CatalogueConformance  # noqa: E402
from casstore.testing.session_checkpoints import CheckpointConformance  # noqa: E402
from casstore.testing.session_commits import CommitConformance  # noqa: E402
from casstore.testing.session_compare import CompareConformance, PinConformance  # noqa: E402
from casstore.testing.session_deletion import DeletionConformance  # noqa: E402
from casstore.testing.session_forks import ForkConformance  # noqa: E402
from casstore.testing.session_graphs import GraphConformance  # noqa: E402
from casstore.testing.session_history import HistoryConformance  # noqa: E402
from casstore.testing.session_leases import LeaseConformance  # noqa: E402
from casstore.testing.session_lifetimes import LifetimeConformance  # noqa: E402
from casstore.testing.session_model import ModelConformance  # noqa: E402
from casstore.testing.session_nodes import NodesConformance  # noqa: E402
from casstore.testing.session_picker import PickerConformance  # noqa: E402
from casstore.testing.session_queue import QueueConformance  # noqa: E402
from casstore.testing.session_races import RaceConformance  # noqa: E402
from casstore.testing.session_reopen import HandleConformance, ReopenConformance  # noqa: E402
from casstore.testing.session_tombstones import TombstoneConformance  # noqa: E402
from casstore.testing.session_turns import TurnConformance  # noqa: E402


class SessionConformance(
    CommitConformance,
    TurnConformance,
    LeaseConformance,
    GraphConformance,
    NodesConformance,
    CheckpointConformance,
    QueueConformance,
    AttachmentConformance,
    TombstoneConformance,
    HistoryConformance,
    ForkConformance,
    AdoptionConformance,
    CompareConformance,
    PinConformance,
    LifetimeConformance,
    CatalogueConformance,
    PickerConformance,
    DeletionConformance,
    HandleConformance,
    RaceConformance,
    ModelConformance,
):
    """The guarantees of the session runtime while its store is open."""


class PersistentSessionConformance(SessionConformance, ReopenConformance):
    """The same guarantees, and that reopening a store preserves its sessions."""
