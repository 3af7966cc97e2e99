// Cases of context-parallel attention: operands of whole sequences that every rank can generate,
// the rows of one rank, and one process's result.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "overlap/attention/operator.h"

namespace tandem::test {

struct ContextCase {
  int ranks = 2;
  ContextShape shape = {};
  int64_t window = 0;
  int64_t document = 0;  ///< mean length; 0: one document
  std::string describe() const;
};

/// Cases over 1 to 8 ranks, with sequences of one position, of fewer than 2 x ranks, and of any
/// number. The same on every call.
std::vector<ContextCase> generate_cases(int count, DType dtype);

/// Operands and results of a rank, or of all rows as one rank.
class ContextProblem {
 public:
  ContextProblem(const ContextCase& of, int ranks, int rank);
  ContextForward forward() const { return {q, k, v, out, log_sums, mask}; }
  ContextBackward backward() const { return {q, k, v, out, log_sums, dout, dq, dk, dv, mask}; }
  void run(ContextOperator& attention) const;
  /// Bytes of out, log_sums, dq, dk and dv.
  std::vector<std::byte> result() const;
  void clear();

  ContextGrid grid;
  AttentionMask mask;
  Tensor q, k, v, out, log_sums, dout, dq, dk, dv;

 private:
  /// Tensor of `rows` of each sequence, with a few unused columns; random unless `name` is null.
  Tensor make(const char* name, const schedule::ContextRows& rows, int64_t positions,
              int64_t columns);
  std::vector<Memory> memory_;
};

}  // namespace tandem::test
