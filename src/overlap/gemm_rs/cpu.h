// GEMM+RS on CPU ranks: a chunk of an owner's rows is sent as soon as its GEMM is finished; the
// owner sums it while later chunks are in flight.
#pragma once

#include <vector>

#include "collectives/rows/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "overlap/contract/rows_product.h"
#include "schedule/ring.h"
#include "tandem/overlap.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

class GemmRsCpu {
 public:
  GemmRsCpu(Communicator& comm, const OpDesc& desc);
  std::vector<Candidate> candidates(const std::vector<int>& chunk_counts);

 private:
  int signal(int source, int chunk) const { return source * kMaxChunks + chunk; }
  void run(Strategy form, int chunks, bool encoded, const Operands& operands);
  void send(int chunks, int owner, int chunk, bool encoded);
  void reduce(int chunks, int chunk, bool encoded, const Operands& operands);
  schedule::Range rows_of(int chunks, int owner, int chunk) const;
  /// Offset of a chunk's messages among those of its owner's rows.
  size_t messages_before(int chunks, int owner, int chunk) const;

  int rank_, world_;
  OpDesc desc_;
  RowsProduct product_;
  size_t row_bytes_;  ///< row bytes of partial sums
  int64_t max_rows_;  ///< max rows of any shard
  RowMessages messages_;
  size_t encoded_area_;         ///< bytes of one owner's messages; 0 without a wire format
  size_t area_;                 ///< room for these messages or for uncompressed rows
  size_t partial_bytes_;        ///< bytes of the uncompressed partial sums
  OverlapWorkspace workspace_;  ///< shared: [source][area]; scratch: [m][n], [owner][encoded area]
  Memory decoded_;              ///< [source][max_rows][n]
  std::vector<const std::byte*> partials_;
};

}  // namespace tandem
