// Measures one operator or plain collective the way `tandem bench` reports it: GEMM alone, serial
// and overlapped in random order, ranks aligned, the slowest rank counting, and the result checked
// against the unfused reference in the same run.
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
#include "tandem/codec.h"
#include "tandem/communicator.h"
#include "tandem/quantize.h"
#include "tune/candidate.h"

namespace tandem {

/// Of a Mixture-of-Experts layer; m, n and k are then its tokens, an expert's width and the hidden
/// features.
struct MoeBench {
  std::string model;
  int experts = 0, top_k = 0, ep = 0, tp = 1;  ///< ep 0: ranks / tp
  int64_t hidden = 0, ffn = 0;                 ///< these and the two before, 0: the model's
  double imbalance = 1;  ///< of the EP ranks, most over mean, about; 0: Zipf's law
  int64_t scale = 1;     ///< hidden and ffn are divided by it
  bool backward = false;

  bool has_all_sizes() const { return experts > 0 && top_k > 0 && hidden > 0 && ffn > 0; }
};

struct BenchRequest {
  std::string op;
  int64_t m = 0, n = 0, k = 0;  ///< whole sizes: AG splits N over ranks, RS and AR split K
  DType dtype = DType::f32;
  int chunks = 0;  ///< 0: the fastest of chunk_counts (tune/candidate.h)
  int repeats = 15;
  bool timeline = false;              ///< record one more overlapped call
  Scaling scaling = Scaling::tensor;  ///< e4m3, whose results are bf16
  bool add_norm = false;              ///< gemm_ar: residual and RMSNorm behind it
  Wire wire{};                        ///< not of broadcast and ag_wgrad
  MoeBench moe = {};
  int64_t layers = 4;   ///< prefill: m tokens, MLPs of width n, k hidden features
  bool library = true;  ///< plain collectives on MPI ranks: beside MPI's own
};

/// What plain collectives move. How many bytes `lossless` saves depends on the values, so it moves
/// what weights and activations are like; all other formats and sums take uniform values, in
/// [-1, 1).
enum class BenchData { uniform, normal };
BenchData data_of(const BenchRequest& request);
/// Whether it is a collective that adds nothing: its results are bits of its operands.
bool only_moves(std::string_view op);

struct BenchForm;  // bench/bench_subject.h

struct BenchTimes {
  double median_us = 0, least_us = 0, most_us = 0;
  /// GPUs: until the call returned, after an idle gap and in a row of calls.
  double host_us = 0, host_burst_us = 0;
  std::vector<double> rounds_us;
};

struct BenchCandidate {
  Form form;
  BenchTimes times;
  bool encoded = false;
};

struct NamedTimes {
  std::string name;
  BenchTimes times;
};

/// Of an encoded plain collective, each timed alone (bench/codec_limit.h).
struct CodecTimes {
  BenchTimes wire;  ///< the encoded bytes alone
  BenchTimes codec, transport;
  /// No call can take less: the link and the rank's core work beside each other.
  double limit_us() const {
    return std::max(wire.median_us, codec.median_us + transport.median_us);
  }
};

struct BenchResult {
  /// `serial` and `overlapped` are the fastest candidates of their form; of prefill `overlapped` is
  /// the fastest of all, which is what would be chosen.
  BenchTimes gemm, serial, overlapped, wire;
  std::map<std::string, BenchCandidate> candidates;
  std::string serial_name, overlapped_name;  ///< which those are
  std::optional<BenchTimes> nccl;            ///< GPUs: the serial form by NCCL
  int64_t bytes = 0;                         ///< that one rank puts on the wire, not encoded
  int64_t wire_bytes = 0;                    ///< with a codec: that it does put there
  std::optional<CodecTimes> codec_times;     ///< plain collectives with a codec
  int chunks = 0;
  std::string baseline;  ///< what `serial` is the time of: "MPI_Allreduce", "serial_nccl", …
  double max_rel = 0, bound = 0;
  double baseline_max_rel = 0;  ///< of a library's collective; 0 where the baseline is ours
  double baseline_bound = 0;
  bool bitwise_equal_runs = true;

  std::string detail;   ///< GPUs: which variant of the overlapped candidate
  bool graph = false;   ///< timed as CUDA graphs
  double of_bound = 0;  ///< largest error beside what rounding may cost there; `bound` is 1
  bool finite = true;

  std::vector<RankEvents> timeline;  ///< where asked for, of every rank

  /// Of the rounds' differences; GPUs, whose clock is kept: of the medians. 0 without a GEMM.
  Exposed ect;
  std::optional<EfficiencyRange> efficiency_range;  ///< none of few rounds

  /// Keeps its times; the fastest of its form so far becomes `serial` or `overlapped`.
  /// One that is `encoded` does not become `serial`.
  void add(const std::string& name, Form form, const BenchTimes& times, bool encoded = false);
  /// The fastest of these becomes `overlapped`, whatever its form.
  void choose_among(std::span<const BenchForm> forms);
  /// After gemm, serial and overlapped.
  void set_efficiency(EctOf how);
  double limit_us() const;
  /// One GPU: the bare product's speed is 1. There is nothing to overlap.
  double parity() const { return gemm.median_us / serial.median_us; }
  /// Whether the serial form exposes communication that the rounds' noise does not hide. Else
  /// `efficiency` says nothing.
  bool exposes() const {
    return ect.serial_us > 0 && (!efficiency_range || efficiency_range->is_narrow());
  }
  double efficiency() const { return ect.efficiency(); }
  /// What E would be if this were the overlapped time. Of an operator.
  double efficiency_of(const BenchTimes& times) const;
  /// How much longer than the GEMM alone. Of an operator.
  double over_gemm(const BenchTimes& times) const { return times.median_us / gemm.median_us - 1; }
  /// With a codec: the fastest overlapped candidate without it, and the fastest one with it.
  std::optional<NamedTimes> fastest_plain() const;
  std::optional<NamedTimes> fastest_encoded() const;
  bool ok() const {
    return finite && of_bound <= 1 && max_rel <= bound && baseline_max_rel <= baseline_bound &&
           bitwise_equal_runs;
  }

 private:
  std::optional<NamedTimes> fastest(const std::function<bool(const BenchCandidate&)>& counts) const;
  EctOf ect_of_ = EctOf::medians;
};

std::vector<std::string> bench_ops();
/// Whether `op` computes: an overlap operator or more of them, else a plain collective.
bool is_gemm(std::string_view op);
/// Whether it is a Mixture-of-Experts layer or one of its operators.
bool is_moe(std::string_view op);

/// Throws InvalidArgument for an unknown operator, a dtype that is neither f32 nor bf16, a size
/// below 1, or sizes whose matrices this machine cannot hold for those of `ranks` that it runs.
void check_bench(const BenchRequest& request, int ranks);

/// Throws InvalidArgument where a GPU's part needs more than its `memory` bytes (0: unknown).
void check_gpu_memory(const BenchRequest& request, int ranks, double memory);

/// Collective; the same result on every rank. Checks the request first.
BenchResult run_bench(Communicator& comm, const BenchRequest& request);

/// The same on GPU ranks, where every candidate of an operator is checked against the exact product
/// and timed. Throws Unsupported for what has no GPU form.
BenchResult run_gpu_bench(Communicator& comm, const BenchRequest& request);

}  // namespace tandem
