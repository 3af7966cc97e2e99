// Measurement of one operator or collective for `tandem bench`: GEMM only, serial and overlapped
// forms in random order, ranks aligned, the slowest rank counting, and the result checked against
// the unfused reference in the same run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/efficiency.h"
#include "observe/trace.h"
#include "overlap/contract/receipt.h"
#include "tandem/codec.h"
#include "tandem/communicator.h"
#include "tandem/moe.h"
#include "tandem/quantize.h"
#include "tune/candidate.h"

namespace tandem {

/// Shape of a Mixture-of-Experts layer; m, n and k of the request are then its tokens, an expert's
/// width and the hidden features.
struct MoeBench {
  std::string model;
  int experts = 0, top_k = 0, ep = 0, tp = 1;  ///< ep 0: ranks / tp
  int64_t hidden = 0, ffn = 0;                 ///< 0, like experts and top_k: the model's
  double imbalance = 1;  ///< approximate max over mean of the EP ranks' loads; 0: Zipf's law
  int64_t scale = 1;     ///< divisor of hidden and ffn
  bool backward = false;
  MoeSave save = MoeSave::sorted;  ///< with `backward`

  bool has_all_sizes() const { return experts > 0 && top_k > 0 && hidden > 0 && ffn > 0; }
};

struct BenchRequest {
  std::string op;
  int64_t m = 0, n = 0, k = 0;  ///< full sizes: AG shards N over ranks, RS and AR shard K
  DType dtype = DType::f32;
  int chunks = 0;  ///< 0: the fastest of chunk_counts (tune/candidate.h)
  int repeats = 15;
  bool timeline = false;              ///< record one more overlapped call
  Scaling scaling = Scaling::tensor;  ///< e4m3, with bf16 results
  bool add_norm = false;              ///< gemm_ar: followed by residual add and RMSNorm
  Wire wire{};                        ///< not for broadcast and ag_wgrad
  MoeBench moe = {};
  int64_t layers = 4;   ///< prefill: m tokens, MLPs of width n, k hidden features
  bool library = true;  ///< collectives on MPI ranks: also time MPI's own
};

/// Distribution of the values that collectives move. Savings of `lossless` depend on the values, so
/// it uses normal ones, like weights and activations; all other formats and sums use uniform
/// values, in [-1, 1).
enum class BenchData { uniform, normal };
BenchData data_of(const BenchRequest& request);
/// Whether the collective only moves data: its results are bits of its operands.
bool only_moves(std::string_view op);

struct BenchTimes {
  double median_us = 0, min_us = 0, max_us = 0;
  /// GPUs: host time until the call returns, after an idle gap and in a burst of calls.
  double host_us = 0, host_burst_us = 0;
  std::vector<double> rounds_us;
};

/// Times of rounds, in seconds, at least one.
BenchTimes times_of(const std::vector<double>& seconds);

struct CandidateTimes {
  Strategy form;
  BenchTimes times;
  bool encoded = false;
};

struct NamedTimes {
  std::string name;
  BenchTimes times;
};

/// Times of the components of an encoded collective, measured separately (bench/codec_limit.h).
struct CodecTimes {
  BenchTimes wire;  ///< transfer of only the encoded bytes
  BenchTimes codec, transport;
  /// Lower bound of a call: the link time or the rank's core time, which overlap.
  double limit_us() const {
    return std::max(wire.median_us, codec.median_us + transport.median_us);
  }
};

/// Candidate that is the unfused reference, and no operator's.
inline constexpr const char* kUnfused = "unfused";

struct BenchResult {
  /// `serial` and `overlapped` are the fastest candidates of their form; for prefill `overlapped`
  /// is the fastest of all, the one that would be chosen.
  BenchTimes gemm, serial, overlapped, wire;
  std::map<std::string, CandidateTimes> candidates;
  std::string serial_name, overlapped_name;  ///< their names
  std::optional<BenchTimes> nccl;            ///< GPUs: the serial form with NCCL
  int64_t bytes = 0;                         ///< bytes sent per rank, uncompressed
  int64_t saved_bytes = 0;                   ///< of moe with backward: largest batch of a rank
  int64_t wire_bytes = 0;                    ///< with a codec: bytes sent per rank, encoded
  std::optional<CodecTimes> codec_times;     ///< collectives with a codec
  int chunks = 0;
  std::string baseline;  ///< name of the `serial` implementation: "MPI_Allreduce", "serial_nccl", …
  double max_rel = 0, bound = 0;
  double baseline_max_rel =
      0;  ///< error of a library's collective; 0 for a baseline of this library
  double baseline_bound = 0;
  bool bitwise_equal_runs = true;

  std::vector<Receipt> receipts;  ///< with a GEMM: what an operator runs, of moe by pass
  std::string refusals;           ///< why candidates cannot run

  std::string detail;   ///< GPUs: variant of the overlapped candidate
  bool graph = false;   ///< timed as CUDA graphs
  double of_bound = 0;  ///< largest ratio of an error to its rounding bound; `bound` is 1
  bool finite = true;

  std::vector<RankEvents> timeline;  ///< if requested, of every rank

  /// ECT from the rounds' differences; on GPUs, with their fixed clock, from the medians. 0 without
  /// a GEMM.
  Exposed ect;
  std::optional<EfficiencyRange> efficiency_range;  ///< nullopt for few rounds

  /// Adds a candidate; the fastest so far of its form becomes `serial` or `overlapped`. An
  /// `encoded` one never becomes `serial`.
  void add(const std::string& name, Strategy form, const BenchTimes& times, bool encoded = false);
  /// Sets `overlapped` to the fastest of these, of either form.
  void choose_among(std::span<const BoundCandidate> forms);
  /// Requires gemm, serial and overlapped.
  void set_efficiency(EctOf how);
  double limit_us() const;
  /// Speed relative to the bare GEMM, for one GPU, which has nothing to overlap.
  double parity() const { return gemm.median_us / serial.median_us; }
  /// Whether the serial form's exposed communication exceeds the rounds' noise. Else `efficiency`
  /// is meaningless.
  bool exposes() const {
    return ect.serial_us > 0 && (!efficiency_range || efficiency_range->is_narrow());
  }
  double efficiency() const { return ect.efficiency(); }
  /// E with `times` as the overlapped time. Operators only.
  double efficiency_of(const BenchTimes& times) const;
  /// Relative overhead over the bare GEMM. Operators only.
  double over_gemm(const BenchTimes& times) const { return times.median_us / gemm.median_us - 1; }
  /// With a codec: the fastest uncompressed overlapped candidate, and the fastest encoded one.
  std::optional<NamedTimes> fastest_uncompressed() const;
  std::optional<NamedTimes> fastest_encoded() const;
  bool ok() const {
    return finite && of_bound <= 1 && max_rel <= bound && baseline_max_rel <= baseline_bound &&
           bitwise_equal_runs;
  }

 private:
  std::optional<NamedTimes> fastest(const std::function<bool(const CandidateTimes&)>& counts) const;
  EctOf ect_of_ = EctOf::medians;
};

std::vector<std::string> bench_ops();
/// Whether `op` computes (one or more overlap operators), else it is a collective.
bool is_gemm(std::string_view op);
/// Whether `op` is a Mixture-of-Experts layer or one of its operators.
bool is_moe(std::string_view op);

/// Throws InvalidArgument for an unknown operator, a dtype that is neither f32 nor bf16, a size
/// below 1, or matrices that exceed this machine's memory for those of `ranks` that it runs.
void check_bench(const BenchRequest& request, int ranks);

/// Throws InvalidArgument if one GPU needs more than its `memory` bytes (0: unknown).
void check_gpu_memory(const BenchRequest& request, int ranks, double memory);

/// Checks the request, then measures; the same result on every rank. Collective.
BenchResult run_bench(Communicator& comm, const BenchRequest& request);

/// run_bench on GPU ranks: every candidate of an operator is checked against the exact product and
/// timed. Throws Unsupported for operators without a GPU form.
BenchResult run_gpu_bench(Communicator& comm, const BenchRequest& request);

}  // namespace tandem
