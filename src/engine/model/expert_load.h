// Expert load of a step: tokens of all ranks per expert and the router's probabilities, from which
// the auxiliary loss, the router biases and reports are computed.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "core/exec.h"
#include "kernels/router.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

/// Callback with one router's choices for this rank's rows, on its device. scores: f32 [rows,
/// experts]; chosen: i32 [rows, top_k].
using RoutedRowsSeen = std::function<void(int layer, const Tensor& scores, const Tensor& chosen)>;

/// Rows of the experts of every layer.
struct ExpertCounts {
  int64_t experts = 1;
  std::vector<double> rows;  ///< [layers][experts]

  int64_t layers() const { return int64_t(rows.size()) / experts; }
  /// Rows per expert in `layer`; they sum to top_k times the tokens that are not padding.
  std::vector<double> of(int layer) const;
  /// Max over mean of the rows of `shards` contiguous ranges of experts (EP ranks, or single
  /// experts).
  double imbalance(int layer, int shards) const;
};

class ExpertLoad {
 public:
  /// On exec's device. `axes`: communicators along which `share` sums in turn; must outlive this
  /// object.
  ExpertLoad(const Exec& exec, int64_t layers, int64_t experts, std::vector<Communicator*> axes,
             RoutedRowsSeen seen = {});

  void clear();
  /// scores: f32 [rows, experts]; chosen: i32 [rows, top_k].
  void add(int layer, const Tensor& scores, const Tensor& chosen);
  /// Adds the load of the same layers and experts.
  void add(const ExpertLoad& other);
  /// Sums over the ranks of all axes. Collective.
  void share();

  /// As kernels/router.h describes: of all layers, one a row, or of one.
  Tensor layers() const;
  Tensor layer(int layer) const;
  /// Blocks until the load has been computed.
  ExpertCounts counts() const;

 private:
  Exec exec_;
  int64_t layers_, experts_;
  std::vector<Communicator*> axes_;
  RoutedRowsSeen seen_;
  Memory sums_, gathered_;
  Fence fence_;
};

}  // namespace tandem
