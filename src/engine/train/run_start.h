// Facts about a run that are known when it starts: the lines that describe it and the first line
// of its ledger.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "engine/data/ledger_lines.h"
#include "engine/data/sampler.h"
#include "engine/data/token_source.h"
#include "engine/parallel/dims.h"

namespace tandem {

/// Lines for the log: model, data, padding, batch ramp-up.
std::vector<std::string> describe_run(const TrainConfig& config, const TokenSource& source,
                                      const Sampler& sampler);

/// Layout, size of buckets and layers of stages: part of a checkpoint's description.
std::string describe_layout(const ParallelDims& dims, const TrainConfig& config, bool on_gpu);

/// Targets of samples [0, end).
int64_t count_targets(const Sampler& sampler, int64_t end);

/// Line of the last step in the file `ledger` that ends at or before sample `next_sample`; empty if
/// there is none. Throws IoError for a file that cannot be read.
std::string find_cursors(const std::string& ledger, int64_t next_sample);
/// Gives the sampler the cursors of such a line.
void seek_cursors(const std::string& line, const Sampler& sampler);

LedgerStart ledger_start(const TrainState& state, const TrainConfig& config,
                         const Sampler& sampler);

}  // namespace tandem
