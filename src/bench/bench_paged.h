// Measurement of a decode step's attention over paged keys and values
// (kernels/attention/paged_attention.h) for `tandem bench paged`: the forms that the ranks' device
// has, interleaved. Rows and heads of each form are checked in the same run against attention in
// double, and its repeated runs against each other.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "tandem/communicator.h"

namespace tandem {

struct PagedBench {
  int64_t rows = 4;       ///< of a step, of sequences of their own
  int64_t tokens = 2080;  ///< of each sequence
  int64_t heads = 32, kv_heads = 8, head_dim = 128;
  int64_t window = 0;  ///< as AttentionMask::window
  DType dtype = DType::bf16;
  bool batch_invariant = false;         ///< as in PagedShape, for the forms that choose
  std::vector<std::string> forms = {};  ///< names of paged_bench_forms; empty: all that run
  int repeats = 20;

  /// Bytes of keys and values that a step reads.
  double bytes() const;
};

struct PagedBenchResult {
  std::map<std::string, BenchTimes> forms;
  std::map<std::string, std::vector<std::string>> refusals;  ///< reasons, and forms not run
  double of_bound = 0;    ///< largest ratio of a result's error to its bound
  bool same_bits = true;  ///< of repeated runs

  bool ok() const { return of_bound <= 1 && same_bits; }
};

/// Names, and what they are.
struct PagedBenchForm {
  const char *name, *text;
  int cluster;   ///< as in PagedShape
  bool appends;  ///< PagedRows::distinct_sequences
};
const std::vector<PagedBenchForm>& paged_bench_forms();

/// Every rank runs a step of its own; the slowest counts. Collective. Throws InvalidArgument for
/// sizes that do not fit each other, Unsupported for a named form that the device lacks.
PagedBenchResult run_paged_bench(Communicator& comm, const PagedBench& request);

/// Whether the GPU of this thread shares a row's keys among the blocks of a cluster.
bool has_paged_clusters(const PagedBench& request);
/// Times of work that is enqueued on the ranks' GPUs, as CUDA graphs. Collective.
std::vector<BenchTimes> time_on_gpus(Communicator& comm, const std::vector<BoundCandidate>& forms,
                                     int repeats);

}  // namespace tandem
