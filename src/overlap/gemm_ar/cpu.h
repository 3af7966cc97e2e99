// GEMM+AR on CPU ranks. Two-shot: panel by panel, each rank sums its share of the rows and sends
// the sums to all; panel p + 1 is computed while panel p travels. One-shot, for few bytes: every
// rank sends everything to every other and sums it all. Both add the same numbers in the same
// order, so every rank and every plan ends with the same bits.
//
// With AddNorm the owner adds the residual to its sums and sends hidden rows; every rank norms all
// of them itself: a row's norm costs less than its bytes on any wire.
#pragma once

#include <vector>

#include "overlap/plan.h"
#include "overlap/workspace.h"
#include "tandem/overlap.h"

namespace tandem {

/// One-shot moves world / 2 times the bytes but takes one latency instead of two.
bool one_shot_allowed(const GemmAr::Shape& shape);
/// Where latency surely outweighs bytes.
bool one_shot_preferred(const GemmAr::Shape& shape);

class GemmArCpu {
 public:
  GemmArCpu(Communicator& comm, const GemmAr::Shape& shape);
  void run(const Plan& plan, const Tensor& x, const Tensor& weight, const Tensor& out,
           const Tensor* bias, const AddNorm* add_norm);

 private:
  // What a run fills, and from what.
  struct Call {
    const Tensor& out;
    const Tensor* bias;
    const AddNorm* add_norm;
    /// Where sums go: of these rows.
    Tensor sums(int64_t begin, int64_t count) const;
  };
  int partial_signal(int source, int panel) const { return source * kMaxChunks + panel; }
  int result_signal(int owner, int panel) const { return (world_ + owner) * kMaxChunks + panel; }
  std::byte* partial(int64_t row) const;
  void product(int panel, const Plan& plan, const Tensor& x, const Tensor& weight);
  void send_partials(int panel, const Plan& plan);
  void reduce(int panel, const Plan& plan, const Call& call);
  void collect(int panel, const Plan& plan, const Call& call);
  void run_one_shot(const Call& call);
  void run_alone(const Tensor& x, const Tensor& weight, const Call& call);

  int rank_, world_;
  GemmAr::Shape shape_;
  size_t line_;
  int64_t area_rows_;           ///< rows of partial sums that each source may leave here
  size_t results_at_;           ///< byte offset of the summed [m, n] in the shared memory
  OverlapWorkspace workspace_;  ///< shared: [source][area_rows][n], then [m][n]; scratch: [m][n]
  std::vector<const std::byte*> parts_;
};

}  // namespace tandem
