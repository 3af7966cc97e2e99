// What an operator can be run by. An operator lists its candidates; the tuner chooses one, and the
// benchmark and the tests go through all of them. On CPU ranks all that are encoded give the same
// bits, and so do the others (see rows_keep_bits in gemm/gemm.h; sums have one fixed order).
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

/// Whether the collective and the GEMM run one after the other, whoever wrote their kernels, or at
/// once. Of a plain collective, a library's is serial and ours overlapped.
enum class Form : uint8_t { serial, overlapped };
std::string_view name_of(Form form);

/// What one call of an operator reads and writes.
struct Operands {
  const Tensor &x, &weight, &out;
  const Tensor* bias = nullptr;
  const Scales* scales = nullptr;
  const AddNorm* add_norm = nullptr;
};

struct Candidate {
  std::string name;  ///< the tuner's: the same on all ranks
  Form form = Form::serial;
  std::function<void(const Operands&)> run;  ///< operands as they were checked
  bool encoded = false;                      ///< rows travel in a wire format
  int chunks = 1;                            ///< transfers of a shard
};

using schedule::kMaxChunks;

/// The serial one, in a single chunk, and an overlapped one for each count.
std::vector<Candidate> chunked_candidates(
    const std::vector<int>& chunk_counts,
    const std::function<void(Form, int chunks, const Operands&)>& run);

/// Chunk counts worth trying: 1, 2, 3 and 5 while the smallest piece of `rows` keeps 16.
std::vector<int> chunk_counts(int64_t rows);

/// Those of the overlapped candidates that `options` leave: none for `serial`; what they say; else
/// all of chunk_counts, or, for `overlapped`, the one that gives pieces of at least 32 rows. Throws
/// InvalidArgument for chunks outside [0, kMaxChunks].
std::vector<int> chunk_counts(std::string_view op, const OverlapOptions& options, int64_t rows);

}  // namespace tandem
