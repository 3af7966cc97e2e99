// Proof, from the ledger of a run, that its steps consumed each sample exactly once. As an epoch's
// samples are a permutation of its windows (engine/data/sampler.h), each window was consumed once
// in each complete epoch; in a blend, of its source. Of a stream of shards, whose windows have no
// gap, it shows that cursors never go back; `rehash_steps` compares them with the data.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/data/ledger/ledger_lines.h"

namespace tandem {

/// A checkpoint of the run, or its final model.
struct ConsumedSamples {
  std::string name;
  int64_t step = 0;         ///< finished ones
  int64_t next_sample = 0;  ///< samples that they consumed
};

/// Samples of a source of a blend. Their first `samples` / `windows` epochs are complete.
struct SourceSamples {
  int64_t samples = 0;
  int64_t windows = 0;  ///< samples of its epoch
};

/// Step that consumed samples [begin, end), and that no later start drops.
struct ConsumedStep {
  int64_t line = 0, step = 0, begin = 0, end = 0;
  bool is_skip = false;
  uint64_t text_hash = 0;
  std::vector<StreamCursor> cursors = {};  ///< of streams
};

struct LedgerCheck {
  /// One line each, in the order of the file: samples without a record or with two, lines that are
  /// missing, doubled or changed, another text, checkpoints that the ledger does not reach.
  std::vector<std::string> problems;
  int64_t lines = 0;
  int64_t starts = 0;
  // Counts of what no later start drops.
  int64_t steps = 0, skipped_steps = 0, skipped_samples = 0;
  int64_t dropped_steps = 0;           ///< made, lost and consumed anew
  int64_t next_sample = 0;             ///< end of the samples with a record
  int64_t windows = 0;                 ///< samples of an epoch; 0: of streams
  std::vector<SourceSamples> sources;  ///< of a blend; else empty
  std::vector<ConsumedStep> consumed;
  LedgerStart start;  ///< the last one
  bool ok() const { return problems.empty(); }
};

/// Checks the whole file. Throws IoError if it cannot be read.
LedgerCheck check_ledger(const std::string& path, std::span<const ConsumedSamples> saved);

}  // namespace tandem
