// GEMM+RS on CPU ranks: a chunk of an owner's rows leaves as soon as its product is finished; the
// owner sums while later chunks travel.
#pragma once

#include <vector>

#include "collectives/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "schedule/ring.h"
#include "tandem/overlap.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

OpDesc gemm_rs_desc(const Communicator& comm, const GemmRs::Shape& shape);

class GemmRsCpu {
 public:
  GemmRsCpu(Communicator& comm, const OpDesc& desc);
  std::vector<Candidate> candidates(const std::vector<int>& chunk_counts);

 private:
  int signal(int source, int chunk) const { return source * kMaxChunks + chunk; }
  void run(Form form, int chunks, bool encoded, const Operands& operands);
  void send(int chunks, int owner, int chunk, bool encoded);
  void reduce(int chunks, int chunk, bool encoded, const Operands& operands);
  schedule::Range rows_of(int chunks, int owner, int chunk) const;
  /// Where the messages of a chunk begin among those of its owner's rows.
  size_t messages_before(int chunks, int owner, int chunk) const;

  int rank_, world_;
  OpDesc desc_;
  size_t line_;        ///< bytes of a row of partial sums
  int64_t most_rows_;  ///< of any shard
  RowMessages messages_;
  size_t encoded_area_;         ///< bytes of one owner's messages; 0 without a wire
  size_t area_;                 ///< room for them or for plain rows
  size_t partial_bytes_;        ///< of the partial sums, plain
  OverlapWorkspace workspace_;  ///< shared: [source][area]; scratch: [m][n], [owner][encoded area]
  Buffer decoded_;              ///< [source][most_rows][n]
  std::vector<const std::byte*> parts_;
};

}  // namespace tandem
