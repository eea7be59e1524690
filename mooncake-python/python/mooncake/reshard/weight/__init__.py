"""Layouts of model weights, and plans that move weights from one layout to another."""

from mooncake.reshard.weight.binding import validate_runtime_binding, validate_runtime_bindings
from mooncake.reshard.weight.part import WeightPlacementPart
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.planner import (
    LogicalTransferOperation,
    LogicalTransferPlan,
    PipelineRouteGroup,
    PlacementExecutorPlan,
    PlanningLimits,
    TransferRegion,
    plan_placement_transfer,
    plan_placement_transfer_to_local_target,
    plan_stored_transfer_to_target_placement,
)
from mooncake.reshard.weight.runtime import RuntimeBindingFragment, WeightRuntimeBindingManifest
from mooncake.reshard.weight.serde import weight_placement_from_json, weight_placement_to_json
from mooncake.reshard.weight.storage_manifest import StoredFragment, WeightManifest
from mooncake.reshard.weight.topology import ParallelTopology, TopologyParticipant
from mooncake.reshard.weight.types import OwnershipAxis, ParallelRank, PlacementFragment, ReplicatedAxis, SplitAxis, TensorDescriptor

__all__ = [
    "ParallelRank",
    "ParallelTopology",
    "PlacementFragment",
    "WeightPlacementManifest",
    "WeightPlacementPart",
    "RuntimeBindingFragment",
    "WeightRuntimeBindingManifest",
    "SplitAxis",
    "ReplicatedAxis",
    "OwnershipAxis",
    "TensorDescriptor",
    "TopologyParticipant",
    "validate_runtime_binding",
    "validate_runtime_bindings",
    "weight_placement_from_json",
    "weight_placement_to_json",
    "StoredFragment",
    "WeightManifest",
    "LogicalTransferPlan",
    "LogicalTransferOperation",
    "PipelineRouteGroup",
    "PlacementExecutorPlan",
    "PlanningLimits",
    "TransferRegion",
    "plan_placement_transfer",
    "plan_placement_transfer_to_local_target",
    "plan_stored_transfer_to_target_placement",
]
