// Reference: attention over the gathered rows of all ranks, one query or key at a time, in double.
#pragma once

#include <cstdint>
#include <vector>

#include "overlap/attention/shape.h"
#include "tandem/communicator.h"

namespace tandem {

/// Element of a matrix in f32 or bf16.
double element(const Tensor& tensor, int64_t row, int64_t column);

class ContextReference {
 public:
  /// Collective. `rope` and the mask's tensors must outlive this.
  ContextReference(Communicator& comm, const ContextGrid& grid, const RopeTable* rope,
                   const ContextForward& call);

  /// Magnitudes: the largest element of the sum of the terms' magnitudes, for error bounds.
  struct Query {
    std::vector<double> out;
    double log_sum, magnitude;
  };
  Query query(int64_t sequence, int64_t head, int64_t position) const;

  /// Collective: gathers what the gradients below need. Log-sums and results are those of the call.
  void gather_gradients(const ContextBackward& call);
  struct Gradient {
    std::vector<double> value;
    double magnitude;
  };
  Gradient dq(int64_t sequence, int64_t head, int64_t position) const;
  struct Key {
    Gradient dk, dv;
  };
  Key key(int64_t sequence, int64_t kv_head, int64_t position) const;

  /// Bound of the relative error of an exponential of a score, whose operands are rounded to the
  /// shape's dtype after their rotation, and of a sum of `terms` of them in f32.
  double relative_bound(int64_t terms) const;

 private:
  /// Sum of terms, and of their magnitudes.
  class Sum;
  /// Rows [batch x positions, columns] of all ranks in the order of positions.
  std::vector<double> gather(const Tensor& local, int64_t positions) const;
  /// Local rows of k (`rotates`) or v as the shape's wire format rounds them: a head of a row at a
  /// time, rotated in f32 as in the operator. The format's steps are larger than its other errors,
  /// so a rotation in double would round some elements to another step.
  Memory round_keys(const Tensor& local, bool rotates) const;
  /// Position that a row is rotated by.
  int64_t angle(int64_t sequence, int64_t position) const;
  void rotate(std::vector<double>& rows, int64_t positions, double sign) const;
  int64_t first_key(int64_t sequence, int64_t position) const;
  int64_t end_key(int64_t position) const;
  double score(int64_t sequence, int64_t head, int64_t query, int64_t key) const;
  const double* q_row(const std::vector<double>& rows, int64_t sequence, int64_t head,
                      int64_t position) const;
  const double* k_row(const std::vector<double>& rows, int64_t sequence, int64_t head,
                      int64_t position) const;
  /// Softmax and gradient of a score, and the magnitude of the terms of that gradient.
  struct Pair {
    double p, dscore, terms;
  };
  Pair pair(int64_t sequence, int64_t head, int64_t query, int64_t key) const;
  void rotate_row(double* row, int64_t sequence, int64_t position, double sign) const;

  Communicator& comm_;
  ContextGrid grid_;
  const RopeTable* rope_;
  AttentionMask mask_;
  std::vector<double> q_, k_, v_, dout_, log_sums_, delta_;
};

}  // namespace tandem
