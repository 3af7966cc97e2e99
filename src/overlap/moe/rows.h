// Where the rows of one Mixture-of-Experts call go: from this rank to others, and, on the side of
// the experts, from all ranks to slots. Slots are sorted by expert, then own rows before the pieces
// of the others' (schedule/moe.h), then by rank and by row: pure functions of what all ranks
// routed, so results never depend on when something arrives.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/moe.h"
#include "schedule/moe.h"
#include "tandem/moe.h"

namespace tandem {

/// Memory that grows and is used again.
class GrowingTensor {
 public:
  /// [rows, columns]; what was in it is lost when it grows.
  Tensor of(DType dtype, int64_t rows, int64_t columns);
  /// What is in it.
  Tensor view(DType dtype, int64_t rows, int64_t columns) const;

 private:
  Buffer memory_;
};

/// A shape that was checked, on one rank.
struct MoePlace {
  MoePlace(const Communicator& comm, const MoeShape& shape);
  MoeShape shape;
  schedule::MoeGrid grid;
  int rank, world;
  schedule::Range experts;  ///< of this rank
  int64_t ffn;              ///< this rank's part
  size_t line;              ///< bytes of a row
  /// Of this rank's experts, where all get as many.
  int64_t usual_rows() const;
  std::string describe() const;
};

/// One row's experts, as the wire carries it: top_k numbers, then top_k weights.
struct RoutedRows {
  int64_t rows = 0;
  const std::byte* entries = nullptr;
};
constexpr size_t routed_bytes(int top_k) {
  return size_t(top_k) * (sizeof(int32_t) + sizeof(float));
}

class MoeRows {
 public:
  /// What is wrong with this rank's routing; empty: nothing.
  static std::string fault_of(const MoePlace& place, const MoeRouting& routing);
  /// The sending side: which own rows go to whom.
  void list_sent(const MoePlace& place, const MoeRouting& routing);
  /// The experts' side, from what every rank sent (this rank's own included).
  void list_arrived(const MoePlace& place, std::span<const RoutedRows> sources);

  /// Own rows that `destination` gets, ascending.
  std::span<const int32_t> sent(int destination) const { return sent_[size_t(destination)]; }
  int64_t own_rows() const { return own_rows_; }
  /// Who works on own row `row`, by rank, and as which of the rows it was sent.
  struct Part {
    int32_t rank, row;
  };
  std::span<const Part> parts(int64_t row) const;

  int64_t arrived(int source) const { return arrivals_[size_t(source)].rows; }
  /// Slots of row `row` of those that `source` sent.
  std::span<const MoeUse> uses(int source, int64_t row) const;
  int64_t slots() const { return expert_slots_.back(); }
  /// Own rows times their experts, by EP rank.
  std::span<const int64_t> loads() const { return loads_; }
  std::span<const int64_t> rows_of_experts() const { return expert_rows_; }
  schedule::Range slots_of(int expert) const {
    return {expert_slots_[size_t(expert)], expert_rows_[size_t(expert)]};
  }
  /// Of a local expert: own rows are group 0, piece p of the others' is group p + 1.
  schedule::Range slots_of(int expert, schedule::Range groups) const;
  /// By slot.
  std::span<const float> weights() const { return weights_; }

  GrowingTensor x, gate_up, inner;  ///< by slot; kept for the backward pass
  int level = 0;                    ///< how uneven all ranks' rows are (schedule/moe.h)
  /// By a forward pass that went through; 0: by none.
  struct {
    uint64_t layer = 0, call = 0;
  } filled;
  /// What a forward pass on a GPU leaves, there.
  std::shared_ptr<void> on_gpu;

 private:
  struct Source {
    int64_t rows = 0, first_use = 0;
  };
  static constexpr int kGroups = schedule::kMoePieces + 1;
  int64_t own_rows_ = 0;
  std::vector<std::vector<int32_t>> sent_;
  std::vector<int64_t> loads_;
  std::vector<Part> parts_;
  std::vector<int64_t> part_begin_;
  std::vector<Source> arrivals_;
  std::vector<MoeUse> uses_;
  std::vector<int64_t> use_begin_;     // by arrived row, source by source
  std::vector<int64_t> group_slots_;   // [expert][group]: where it begins
  std::vector<int64_t> expert_slots_;  // where each begins, and the number of all
  std::vector<int64_t> expert_rows_;
  std::vector<float> weights_;
};

/// Throws InvalidArgument where `out` overlaps what a forward pass reads.
void require_moe_apart(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                       const Tensor& w_out, const Tensor& out);

}  // namespace tandem
