// Facts about a run that are known when it starts: the lines that describe it and the first line
// of its ledger.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/exec.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/data/ledger/ledger_lines.h"
#include "engine/data/sampler.h"
#include "engine/data/tokens/token_source.h"
#include "engine/parallel/dims.h"
#include "engine/train/trainer.h"
#include "tandem/communicator.h"

namespace tandem {

/// Throws unless all ranks have the same request and text, and for what GPUs cannot train.
/// Collective.
const TrainRequest& check_request(Communicator& world, const TrainRequest& request,
                                  const TokenSource& source);

/// Lines for the log: model, data, padding, batch ramp-up.
std::vector<std::string> describe_run(const ModelConfig& model, const DataConfig& data,
                                      const RunConfig& train, const TokenSource& source,
                                      const Sampler& sampler);

/// Layout, size of buckets and layers of stages, of a model with `num_layers`: part of a
/// checkpoint's description.
std::string describe_layout(const ParallelConfig& parallel, int64_t num_layers, bool on_gpu);

/// "peak memory: 1.2 GB in this process"
std::string describe_peak(const Exec& exec);

/// Returns the folder of the model `init`, verified, for a run that starts from its weights; an
/// empty string without one. Throws on every rank if it cannot be read or is not `model`.
/// Collective.
std::string find_initial_model(Communicator& world, const std::string& init,
                               const ModelConfig& model,
                               const std::function<void(const std::string&)>& note);

/// Resolves train.dtype "auto", in a resumed run to the dtype of its start; `resumed`: its
/// configuration. Returns a note, or an empty string if there was nothing to resolve. Collective.
std::string choose_run_dtype(Communicator& world, TrainConfig& config, const std::string& resumed);

/// Lines for the log's end: shards of streams that this process has opened, each of them once if
/// samples were read in order.
std::vector<std::string> describe_streams(const TokenSource& source);

/// Learning rate of the step after `state`. `elapsed_s`: seconds of training.
double next_learning_rate(const OptimizerConfig& optimizer, const RunConfig& train,
                          const TrainState& state, double elapsed_s);

/// Targets of samples [0, end).
int64_t count_targets(const Sampler& sampler, int64_t end);

/// Gives a sampler of streams the cursors of the last step in the file `ledger` that ends at or
/// before sample `next_sample`, if there is one. Throws IoError for a file that cannot
/// be read. Collective.
void seek_streams(Communicator& world, const std::string& ledger, int64_t next_sample,
                  const Sampler& sampler);

LedgerStart ledger_start(const TrainState& state, const ParallelConfig& parallel,
                         const RunConfig& train, const Sampler& sampler);

}  // namespace tandem
