// Memory of one rank's gradients, addressed by position in the flat array. Flat: all of it. As a
// window (ZeRO-2): units of the array, such as a layer's, share memory, since gradients leave as
// soon as a backward pass has finished them.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <unordered_set>
#include <vector>

#include "core/exec.h"
#include "engine/model/layout.h"
#include "tandem/tensor.h"

namespace tandem {

/// Range of the flat array that a backward pass finishes at once.
struct GradientUnit {
  FlatRange range;
  bool is_window = true;  ///< of a group whose gradients leave
  bool is_shared = true;  ///< window: its memory may be that of other units, too
  int64_t position = 0;   ///< in memory
  /// Elements from here on must have left before the unit is written: the units after it whose
  /// memory it shares.
  int64_t sent_from = std::numeric_limits<int64_t>::max();
};

/// Sets `position` and `sent_from` of units in descending order of their ranges, the order of the
/// backward pass, and returns the elements of memory from `begin` on. A unit's memory is used again
/// once the bucket of its first element, of `bucket_elements`, is complete two units before.
int64_t assign_units(std::span<GradientUnit> units, int64_t bucket_elements, int64_t begin);

/// Units of a stage's gradients, none if they are flat, and the elements of their memory.
struct GradientLayout {
  std::vector<GradientUnit> units;
  int64_t elements = 0;
};
/// Places what follows the layers, the layers and the embedding, then each layer's experts. A group
/// that is no window is one unit.
GradientLayout assign_gradients(const ModelLayout& layout, const ModelConfig& config,
                                const GradientWindow& window);

/// Bytes of the largest gradient, in f32, that is not written in another dtype at once: with
/// several tensor-parallel ranks, or a head by rows, a matrix's, else a vector's.
size_t gradient_sum_bytes(const ModelLayout& layout, const ModelConfig& config, int64_t tp,
                          bool is_head_by_rows);

class GradientMemory {
 public:
  /// Flat, in memory that must outlive this object.
  explicit GradientMemory(const Tensor& values) : dtype_(values.dtype()), values_(values) {}
  /// Memory of a stage, zero at first. `dtype`: f32 or bf16.
  GradientMemory(const Exec& exec, GradientLayout assigned, DType dtype);

  bool is_flat() const { return units_.empty(); }
  DType dtype() const { return dtype_; }
  /// [elements], if it is flat.
  const Tensor& values() const { return values_; }
  /// [count], of one unit.
  Tensor at(int64_t offset, int64_t count) const;
  /// Calls visit(range, values) for the range's contiguous memory, in ascending order.
  void for_each(FlatRange range,
                const std::function<void(FlatRange range, const Tensor& values)>& visit) const;

  /// Must be called before the gradient at `offset` is written. Returns whether it is added to what
  /// is there: a pass has written it since `begin_step`, or, in a window, since `end`.
  bool begin_write(int64_t offset);
  void begin_step() { written_.clear(); }
  /// Ends the unit's pass; windows only.
  void end(FlatRange unit);
  /// Called by begin_write before the first write to a unit of a window: returns once the elements
  /// of its group from `sent_from` on have left, and those of the pass before.
  void on_first_write(std::function<void(const GradientUnit& unit)> make_room) {
    make_room_ = std::move(make_room);
  }
  size_t bytes() const { return is_flat() ? values_.bytes() : memory_.bytes(); }

 private:
  size_t find(int64_t offset) const;

  DType dtype_;
  Memory memory_;
  Tensor values_;                    // flat
  std::vector<GradientUnit> units_;  // ascending
  std::vector<bool> is_live_;
  std::unordered_set<int64_t> written_;  // offsets
  std::function<void(const GradientUnit& unit)> make_room_;
};

}  // namespace tandem
