// Candidates for running an operator. An operator lists its candidates; the tuner chooses one, and
// the benchmark and the tests run all of them. On CPU ranks all encoded candidates give the same
// bits, and so do all others (see rows_keep_bits in gemm/gemm.h; sums have one fixed order).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "schedule/ring.h"
#include "tandem/norm.h"
#include "tandem/quantize.h"
#include "tandem/strategy.h"
#include "tandem/tensor.h"

namespace tandem {

/// Tensors that one call of an operator reads and writes.
struct Operands {
  const Tensor &x, &weight, &out;
  const Tensor* bias = nullptr;
  const Scales* scales = nullptr;
  const AddNorm* add_norm = nullptr;
  bool accumulate = true;  ///< of a gradient: added to out instead of stored
};

template <typename... Args>
struct CandidateOf {
  std::string name;  ///< unique within its operator, equal on all ranks; also the tuner's name
  /// serial: the collective and the GEMM run one after the other, in any library's kernels;
  /// overlapped: concurrently. For a collective without a GEMM, a library's algorithm is serial,
  /// Tandem's overlapped. Never automatic.
  Strategy form = Strategy::serial;
  std::function<void(Args...)> run = {};
  bool encoded = false;  ///< rows are sent in a wire format
  int chunks = 1;        ///< number of transfers per shard
  /// Candidates that differ only in details (tile shape, transfer, order). The tuner compares them
  /// with each other first, and the fastest with all other candidates, under the family's name.
  std::string family = {};
  double min_gain = 0;       ///< by which it must be faster than those of its family before it
  std::string refusal = {};  ///< why it cannot run; it then has no `run`

  /// Name under which it is compared with candidates outside its family.
  const std::string& group() const { return family.empty() ? name : family; }
};
using Candidate = CandidateOf<const Operands&>;  ///< `run` gets operands that have been checked
using BoundCandidate = CandidateOf<>;            ///< with its operands, to be measured

using schedule::kMaxChunks;

/// Lists the serial candidate, in a single chunk, and an overlapped one for each count.
std::vector<Candidate> chunked_candidates(
    const std::vector<int>& chunk_counts,
    const std::function<void(Strategy, int chunks, const Operands&)>& run);

/// Chunk counts worth trying: 1, 2, 3 and 5, while the smallest chunk of `rows` has at least 16
/// rows.
std::vector<int> chunk_counts(int64_t rows);

/// Chunk counts of the overlapped candidates that `options` allow: none for `serial`; the given
/// count; otherwise all of chunk_counts(rows), or, for `overlapped`, the one whose chunks have at
/// least 32 rows. Throws InvalidArgument for chunks outside [0, kMaxChunks].
std::vector<int> chunk_counts(std::string_view op, const OverlapOptions& options, int64_t rows);

}  // namespace tandem
