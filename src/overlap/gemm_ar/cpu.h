// GEMM+AR on CPU ranks. Two-shot: panel by panel, each rank sums its share of the rows and sends
// the sums to all; panel p + 1 is computed while panel p travels. One-shot, for few bytes: every
// rank sends everything to every other and sums it all. Both add the same numbers in the same
// order, so every rank and every plan ends with the same bits.
//
// With AddNorm the owner adds the residual to its sums and sends hidden rows; every rank norms all
// of them itself: a row's norm costs less than its bytes on any wire.
#pragma once

#include <vector>

#include "overlap/workspace.h"
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
  void run(int panels, const Operands& call);
  void run_one_shot(const Operands& call);
  void run_alone(const Operands& call);
  void product(int panel, int panels, const Operands& call);
  void send_partials(int panel, int panels);
  void reduce(int panel, int panels, const Operands& call);
  void collect(int panel, int panels, const Operands& call);

  int rank_, world_;
  OpDesc desc_;
  size_t line_;
  int64_t area_rows_;           ///< rows of partial sums that each source may leave here
  size_t results_at_;           ///< byte offset of the summed [m, n] in the shared memory
  OverlapWorkspace workspace_;  ///< shared: [source][area_rows][n], then [m][n]; scratch: [m][n]
  std::vector<const std::byte*> parts_;
};

}  // namespace tandem
