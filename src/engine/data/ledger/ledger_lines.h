// Lines of OUT/ledger.jsonl (engine/data/ledger/ledger.h). Each is a JSON object with its number in
// the file and, last, a hash of the line: a line that was removed, doubled or changed is found.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "engine/data/blend/blend_order.h"
#include "engine/data/stream/stream_cursor.h"

namespace tandem {

/// A process begins or resumes a run. Lines above it of samples from next_sample on are dropped:
/// their steps were lost. Below it, until the next one, replica r of `replicas` consumes the r-th
/// of as many equal, consecutive ranges of a step's samples, in microbatches of `microbatch`, on
/// data-parallel rank r mod dp.
struct LedgerStart {
  int64_t step = 0;         ///< finished ones
  int64_t next_sample = 0;  ///< samples that they consumed
  std::string data;         ///< fingerprint of the training stream
  int64_t windows = 0;      ///< samples of an epoch; 0: streams, whose steps have cursors
  int64_t seq = 0, seed = 0;
  int64_t dp = 1, microbatch = 1;
  int64_t replicas = 1;                     ///< dp in files of earlier versions
  std::vector<SampledSource> sources = {};  ///< of a blend; else empty
  bool operator==(const LedgerStart&) const = default;
};

/// A step consumed samples [first_sample, first_sample + samples).
struct LedgerStep {
  int64_t step = 0;  ///< from 1
  int64_t first_sample = 0, samples = 0;
  int64_t epoch = 0;       ///< of the first sample, from 0
  int64_t tokens = 0;      ///< predicted in the step
  uint64_t text_hash = 0;  ///< sum of sample_hash over the samples: independent of the layout
  /// If not empty, the weights were not updated, and the next line has the same step.
  std::string skip_reason;
  /// Sampler::cursors at the begin of the step; empty without streams.
  std::vector<StreamCursor> cursors = {};
  /// Why some learners made no update in a step that counts; else empty.
  std::string no_update = {};
  int64_t end() const { return first_sample + samples; }
  bool operator==(const LedgerStep&) const = default;
};

struct LedgerLine {
  int64_t number = 0;  ///< from 1
  std::variant<LedgerStart, LedgerStep> record;
};

/// Hash of a sample's number and text, padding as kBos. The sum over a step's samples, modulo 2^64,
/// is the same for all layouts.
uint64_t sample_hash(int64_t sample, std::span<const int32_t> tokens,
                     std::span<const int32_t> targets);

/// With a newline.
std::string to_ledger_line(int64_t number, const LedgerStart& start);
std::string to_ledger_line(int64_t number, const LedgerStep& step);

/// `line`: without newline. Throws IoError that names neither file nor line.
LedgerLine parse_ledger_line(std::string_view line);

}  // namespace tandem
