// Routing of the rows of one Mixture-of-Experts call: from this rank to others, and, on the
// experts' side, from all ranks to slots. Slots are sorted by expert, then local rows before the
// waves of remote ones (schedule/moe.h), then by rank and by row: pure functions of all ranks'
// routing, so results never depend on arrival times.
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

/// " saving rows", for what ranks agree on and keys of the tuner; empty if they are sorted.
std::string saves(MoeSave save);
/// " in e4m3", likewise; empty if nothing is quantized.
std::string quantizes(const MoeOptions& options);
/// " clamped at 7, alpha 1.702" of another activation than SwiGLU, likewise.
std::string activates(const MoeOptions& options);

/// Growable memory that is reused.
class GrowingTensor {
 public:
  /// [rows, columns]; contents are lost when it grows.
  Tensor of(DType dtype, int64_t rows, int64_t columns);
  /// View of its contents.
  Tensor view(DType dtype, int64_t rows, int64_t columns) const;
  size_t bytes() const { return memory_.bytes(); }

 private:
  Memory memory_;
};

/// A checked shape, on one rank.
struct MoeRankCoords {
  MoeRankCoords(const Communicator& comm, const MoeShape& shape);
  MoeShape shape;
  schedule::MoeGrid grid;
  int rank, world;
  schedule::Range experts;  ///< experts of this rank
  int64_t ffn;              ///< this rank's shard
  size_t row_bytes;         ///< bytes of a row
  /// Rows of this rank's experts under a balanced routing.
  int64_t usual_rows() const;
  std::string describe() const;
};

/// Encoding of a row's routing in a message: top_k expert ids, then top_k weights.
struct RoutedRows {
  int64_t rows = 0;
  const std::byte* entries = nullptr;
};
constexpr size_t routed_bytes(int top_k) {
  return size_t(top_k) * (sizeof(int32_t) + sizeof(float));
}

class MoeRows {
 public:
  /// Fault of this rank's routing; empty if valid.
  static std::string fault_of(const MoeRankCoords& coords, const MoeRouting& routing);
  /// Sending side: lists the local rows for each destination.
  void list_sent(const MoeRankCoords& coords, const MoeRouting& routing);
  /// Experts' side, from what every rank sent (including this rank).
  void list_arrived(const MoeRankCoords& coords, std::span<const RoutedRows> sources);

  /// Local rows sent to `destination`, ascending.
  std::span<const int32_t> sent(int destination) const { return sent_[size_t(destination)]; }
  int64_t local_rows() const { return local_rows_; }
  /// Ranks with experts of local row `row`, and the row's index among those sent to each.
  struct RowCopy {
    int32_t rank, row;
  };
  std::span<const RowCopy> copies(int64_t row) const;

  int64_t arrived(int source) const { return arrivals_[size_t(source)].rows; }
  /// Number of the first row from `source` among all received rows, and their number.
  int64_t first_received(int source) const { return arrivals_[size_t(source)].first_use; }
  int64_t received() const { return int64_t(use_begin_.size()) - 1; }
  /// Slots of row `row` of those received from `source`.
  std::span<const MoeUse> uses(int source, int64_t row) const;
  int64_t slots() const { return expert_slots_.back(); }
  /// Local rows times their experts, by EP rank.
  std::span<const int64_t> loads() const { return loads_; }
  std::span<const int64_t> rows_of_experts() const { return expert_rows_; }
  schedule::Range slots_of(int expert) const {
    return {expert_slots_[size_t(expert)], expert_rows_[size_t(expert)]};
  }
  /// Slots of a local expert: local rows are group 0, wave p of the remote ones is group p + 1.
  schedule::Range slots_of(int expert, schedule::Range groups) const;
  /// By slot.
  std::span<const float> weights() const { return weights_; }

  // Saved for the backward pass, as MoeSave says.
  GrowingTensor x, gate_up, inner;  ///< by slot
  GrowingTensor distinct;           ///< received rows, source by source
  GrowingTensor sent_rows;          ///< this rank's rows
  size_t saved_bytes() const {
    return x.bytes() + gate_up.bytes() + inner.bytes() + distinct.bytes() + sent_rows.bytes() +
           bytes_on_gpu;
  }
  int level = 0;  ///< imbalance of all ranks' rows (schedule/moe.h)
  /// The forward pass that has completed; 0: none.
  struct {
    uint64_t layer = 0, call = 0;
  } filled;
  /// Saved activations of a forward pass on a GPU.
  std::shared_ptr<void> on_gpu;
  size_t bytes_on_gpu = 0;

 private:
  struct Source {
    int64_t rows = 0, first_use = 0;
  };
  static constexpr int kGroups = schedule::kMaxMoeWaves + 1;
  int64_t local_rows_ = 0;
  std::vector<std::vector<int32_t>> sent_;
  std::vector<int64_t> loads_;
  std::vector<RowCopy> copies_;
  std::vector<int64_t> copy_begin_;
  std::vector<Source> arrivals_;
  std::vector<MoeUse> uses_;
  std::vector<int64_t> use_begin_;     // by received row, source by source
  std::vector<int64_t> group_slots_;   // [expert][group]: first slot
  std::vector<int64_t> expert_slots_;  // first slot of each, then the number of all
  std::vector<int64_t> expert_rows_;
  std::vector<float> weights_;
};

/// Throws InvalidArgument if `out` overlaps an input of a forward pass.
void require_moe_apart(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                       const Tensor& w_out, const Tensor& out);

}  // namespace tandem
