// Collective saving: every rank writes its shard of the full tensors on disk
// (engine/checkpoint/shared_tensors.h), so any TP x DP x PP can resume from a checkpoint of any
// other (engine/checkpoint/loading.h).
// All functions are collective over ranks.world and read only `owned`, not the state in training.
#pragma once

#include <string>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run/trained_ranks.h"

namespace tandem {

/// Saves a checkpoint; returns once all ranks have verified it and rank 0 has committed and pruned.
/// Returns, on every rank, what the verification found, without a checkpoint; empty if it is valid.
/// An error on any rank is thrown on all, including a non-finite weight: no file is written then.
/// `out` is the run's folder as this rank sees it; `keeper` is used only on rank 0.
std::string save_checkpoint(const TrainedRanks& ranks, const OwnedState& owned,
                            const std::string& out, const TrainState& state,
                            const ModelConfig& model, CheckpointKeeper* keeper);
/// "tensor 'NAME' has VALUE at element N, …" for a weight that is so large that its square is not
/// finite, such as of an embedding, which a norm then makes 0; empty without one. Collective.
std::string describe_overflow(const TrainedRanks& ranks, const OwnedState& owned);
/// Writes OUT/final/{config.json, model.safetensors, state.json}, the weights as f32 or bf16; of
/// several learners those of their last exchanges.
void save_final(const TrainedRanks& ranks, const OwnedState& owned, const std::string& out,
                const TrainState& state, const ModelConfig& model, DType dtype);

}  // namespace tandem
