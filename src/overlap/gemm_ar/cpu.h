// GEMM+AR on CPU ranks. Two-shot: panel by panel, each rank sums its share of the rows and sends
// the sums to all; panel p + 1 is computed while panel p travels. One-shot, for few bytes: every
// rank sends everything to every other and sums it all. Both add the same numbers in the same
// order, so every rank and every plan ends with the same bits.
//
// With AddNorm the owner adds the residual to its sums and sends hidden rows; every rank norms all
// of them itself: a row's norm costs less than its bytes on any wire.
//
// With a wire only the two-shot form: partial products leave encoded, the owner adds what they
// decode as, its own too, since whose a row is depends on the number of panels, and sends the sums
// encoded. All ranks, the owner too, keep those as decoded. The residual does not travel: every
// rank adds its own.
#pragma once

#include <vector>

#include "collectives/row_messages.h"
#include "collectives/symmetric_workspace.h"
#include "schedule/ring.h"
#include "tandem/overlap.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

OpDesc gemm_ar_desc(const GemmAr::Shape& shape);

class GemmArCpu {
 public:
  GemmArCpu(Communicator& comm, const OpDesc& desc);
  std::vector<Candidate> candidates(const std::vector<int>& chunk_counts);

 private:
  int partial_signal(int source, int panel) const { return source * kMaxChunks + panel; }
  int result_signal(int owner, int panel) const { return (world_ + owner) * kMaxChunks + panel; }
  std::byte* partial(int64_t row) const;
  schedule::Range rows_of(int panels, int owner, int panel) const;
  /// Where the messages of an owner's rows of a panel begin among those of all its rows.
  size_t messages_before(int panels, int owner, int panel) const;
  std::byte* decoded(int rank) const;
  void run(int panels, bool encoded, const Operands& call);
  void run_one_shot(const Operands& call);
  void run_alone(const Operands& call);
  void product(int panel, int panels, const Operands& call);
  void send_partials(int panel, int panels);
  void reduce(int panel, int panels, const Operands& call);
  void collect(int panel, int panels, const Operands& call);
  void send_encoded_partials(int panel, int panels);
  void reduce_encoded(int panel, int panels, const Operands& call);
  void collect_encoded(int panel, int panels, const Operands& call);
  /// Decodes `messages` of `rows` to `sums` and writes what the call makes of them.
  void take_sums(const schedule::Range& rows, const std::byte* messages, std::byte* sums,
                 const Operands& call);

  int rank_, world_;
  OpDesc desc_;
  size_t line_;
  RowMessages messages_;
  size_t encoded_area_;         ///< bytes of messages of one owner's rows; 0 without a wire
  size_t area_;                 ///< bytes of partial sums that each source may leave here
  size_t results_at_;           ///< byte offset of sums in the shared memory
  size_t partial_bytes_;        ///< of this rank's partial sums
  OverlapWorkspace workspace_;  ///< shared: [source][area], then sums: [m][n] or messages by owner;
                                ///< scratch: [m][n], then messages by owner
  Buffer decoded_;              ///< with a wire: [rank][most rows of a panel's owner][n]
  std::vector<const std::byte*> parts_;
};

}  // namespace tandem
