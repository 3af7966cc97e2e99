// Generation through the engine (engine/infer/engine.h) on a published model with random weights,
// for `tandem bench generate`: a batch of prompts of one length, or requests that arrive at random
// times.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "engine/infer/sampling/sampling.h"
#include "engine/model/config.h"
#include "gemm/coded_weight.h"
#include "tandem/communicator.h"

namespace tandem {

struct GenerateBench {
  std::string model = "llama-1b";
  int64_t layers = 0;       ///< 0: all of the model
  int64_t vocab = 0;        ///< 0: the model's
  int tp = 1;               ///< ranks
  int64_t batch = 1;        ///< requests that are written at once
  int64_t prompt = 128;     ///< tokens
  int64_t max_tokens = 32;  ///< tokens of each text
  int64_t prompt_rows = 0;  ///< rows of a step for chunks of prompts
  int64_t mixed_rows = 0;   ///< as in EngineOptions
  int64_t min_prompt = 0;   ///< prompts have random lengths from this to `prompt`; 0: all `prompt`
  double rate = 0;          ///< requests that arrive in a second, on average; 0: `batch` at once
  int64_t requests = 0;     ///< requests, with `rate`
  bool batch_invariant = false;         ///< as in EngineOptions
  std::optional<bool> runs_ahead = {};  ///< as in EngineOptions
  SamplingOptions sampling = {.temperature = 0};
  std::string dtype = "bf16";
  std::string weights = "none";  ///< name of a WeightFormat, or none: `dtype`
  int repeats = 3;               ///< batches, without `rate`

  std::optional<WeightFormat> format() const { return parse_weight_format(weights); }
  /// Bytes of a weight of a matrix.
  double bytes_per_weight() const {
    return format() ? tandem::bytes_per_weight(*format()) : double(size_of(parse_dtype(dtype)));
  }
};

struct GenerateBenchResult {
  BenchTimes first_token;  ///< of a request, from its arrival
  BenchTimes next_token;   ///< from the token before
  BenchTimes token_step;   ///< of a step in which all `batch` requests have a row, no prompts
  double first_token_p99_us = 0, next_token_p99_us = 0;
  double tokens_per_s = 0;  ///< of all requests
  /// Bytes of weights, keys and values that the ranks read in such a step; of experts as many
  /// as `batch` rows can choose.
  double step_bytes = 0;
  double ahead = 0;  ///< share of the steps that were launched before the tokens of the one before
  double logit_bytes = 0;       ///< that a rank sends to each other one for a token that is sampled
  double read_bytes_per_s = 0;  ///< that all CPU ranks at once reach in a sum of memory; 0 on GPUs
  int64_t preempted = 0;
  double load_s = 0;                   ///< to set the random weights
  int64_t weight_bytes = 0;            ///< of this rank's weights
  int64_t memory_bytes = 0;            ///< in use after the batches (core/exec.h)
  std::vector<Receipt> receipts = {};  ///< of this rank's operators
  /// One request again, with no other: the same tokens and log-probabilities, bit for bit; on GPUs
  /// log-probabilities within 0.1, up to the first token that differs.
  bool is_same_separately = true;

  double bytes_per_s() const { return step_bytes / token_step.median_us * 1e6; }
};

/// Throws InvalidArgument or ConfigError for a request that cannot run.
ModelConfig generate_bench_config(const GenerateBench& request, bool on_gpus);

/// Times are those of this rank. Collective over `tp` ranks.
GenerateBenchResult run_generate_bench(Communicator& tp, const GenerateBench& request);

}  // namespace tandem
