// GEMM+RS on CPU ranks: a chunk of an owner's rows leaves as soon as its product is finished; the
// owner sums while later chunks travel.
#pragma once

#include <vector>

#include "overlap/workspace.h"
#include "tandem/overlap.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

OpDesc gemm_rs_desc(const Communicator& comm, const GemmRs::Shape& shape);
/// With the wire that `options` have.
OpDesc encoded(OpDesc desc, const OverlapOptions& options);

class GemmRsCpu {
 public:
  GemmRsCpu(Communicator& comm, const OpDesc& desc);
  std::vector<Candidate> candidates(const std::vector<int>& chunk_counts);

 private:
  int signal(int source, int chunk) const { return source * kMaxChunks + chunk; }
  void run(Form form, int chunks, bool encoded, const Operands& operands);
  void send(int chunks, int owner, int chunk, bool encoded);
  void reduce(int chunks, int chunk, bool encoded, const Operands& operands);
  /// A message a row, or, of an exact codec, whose bits do not depend on it, one in all. Returns
  /// its bytes.
  size_t encode_rows(const std::byte* values, int64_t rows, std::byte* messages) const;
  /// Decoded, one after the other.
  void decode_rows(const std::byte* messages, int64_t rows, std::byte* to) const;

  int rank_, world_;
  OpDesc desc_;
  size_t line_;                 ///< bytes of a row of partial sums
  int64_t most_rows_;           ///< of any shard
  size_t message_;              ///< of one encoded; 0 without a wire
  size_t slot_;                 ///< room for either
  OverlapWorkspace workspace_;  ///< shared: [source][most_rows][n]; scratch: [m][n], encoded rows
  Buffer decoded_;              ///< [source][most_rows][n]
  std::vector<const std::byte*> parts_;
};

}  // namespace tandem
