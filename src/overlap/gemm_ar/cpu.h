// GEMM+AR on CPU ranks. Two-shot: panel by panel, each rank sums its share of the rows and sends
// the sums to all; panel p + 1 is computed while panel p is in flight. One-shot, for few bytes:
// every rank sends everything to every other and sums it all. Both add the same numbers in the same
// order, so the bits are equal on every rank and for every plan.
//
// With AddNorm the owner adds the residual to its sums and sends hidden rows; every rank norms all
// of them: a row's norm costs less than sending its bytes.
//
// With a wire format only two-shot is used: partial products are sent encoded; the owner adds their
// decoded values, including those of its own partials, since the owner of a row depends on the
// number of panels, and sends the sums encoded. All ranks, including the owner, use the decoded
// sums. The residual is not sent: every rank adds its own.
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

class GemmArCpu {
 public:
  GemmArCpu(Communicator& comm, const OpDesc& desc);
  std::vector<Candidate> candidates(const std::vector<int>& chunk_counts);

 private:
  int partial_signal(int source, int panel) const { return source * kMaxChunks + panel; }
  int result_signal(int owner, int panel) const { return (world_ + owner) * kMaxChunks + panel; }
  std::byte* partial(int64_t row) const;
  schedule::Range rows_of(int panels, int owner, int panel) const;
  /// Offset of the messages of an owner's rows of a panel among those of all its rows.
  size_t messages_before(int panels, int owner, int panel) const;
  std::byte* decoded(int rank) const;
  void run(int panels, bool encoded, const Operands& call);
  void run_one_shot(const Operands& call);
  void run_alone(const Operands& call);
  void product(int panel, int panels);
  void send_partials(int panel, int panels);
  void reduce(int panel, int panels, const Operands& call);
  void collect(int panel, int panels, const Operands& call);
  void send_encoded_partials(int panel, int panels);
  void reduce_encoded(int panel, int panels, const Operands& call);
  void collect_encoded(int panel, int panels, const Operands& call);
  /// Decodes `messages` of `rows` to `sums`, then applies the call's residual and norm.
  void take_sums(const schedule::Range& rows, const std::byte* messages, std::byte* sums,
                 const Operands& call);

  int rank_, world_;
  OpDesc desc_;
  RowsProduct product_;
  size_t row_bytes_;
  RowMessages messages_;
  size_t encoded_area_;         ///< bytes of messages of one owner's rows; 0 without a wire format
  size_t area_;                 ///< bytes of partial sums that each source may store here
  size_t results_at_;           ///< byte offset of sums in the shared memory
  size_t partial_bytes_;        ///< bytes of this rank's partial sums
  OverlapWorkspace workspace_;  ///< shared: [source][area], then sums: [m][n] or messages by owner;
                                ///< scratch: [m][n], then messages by owner
  Memory decoded_;              ///< with a wire format: [rank][max rows of a panel's owner][n]
  std::vector<const std::byte*> partials_;
};

}  // namespace tandem
