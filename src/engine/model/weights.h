// One rank's weights on its device. In f32: one flat array. In bf16: the array that GEMMs read and,
// in training, unless owners of the optimizer state hold the only f32 weights (ZeRO,
// engine/parallel/), the f32 array next to it. Norms and routers are read in f32 in any case.
#pragma once

#include <span>
#include <vector>

#include "core/exec.h"
#include "engine/model/layout.h"
#include "tandem/tensor.h"

namespace tandem {

/// Elements [begin, begin + count) of a flat array that are stored from `position` in an array of
/// such ranges.
struct ExactRange {
  int64_t begin = 0, count = 0, position = 0;
};

/// Views of weights by position in a flat array.
struct WeightViews {
  WeightViews() = default;
  /// Weights in f32, with a working copy or without.
  WeightViews(const Tensor& values, const Tensor& copy = {}) : f32(values), working(copy) {}

  Tensor f32;      ///< [elements]; without data if only `exact` is in f32
  Tensor working;  ///< [elements] in the dtype of GEMMs; without data if that is f32
  Tensor exact;    ///< f32, the elements of exact_ranges, without `f32`
  std::vector<ExactRange> exact_ranges;  ///< ascending

  int64_t elements() const { return f32.data() ? f32.elements() : working.elements(); }
  size_t bytes() const;
  /// Throws InvalidArgument if the range is not in f32.
  Tensor in_f32(FlatRange range) const;
  WeightViews narrow(FlatRange range) const;
};

class Weights {
 public:
  /// `has_f32`: of a dtype other than f32, all weights are in f32, too. Throws InvalidArgument for
  /// a dtype other than f32 and bf16.
  Weights(const Exec& exec, const ModelLayout& layout, DType dtype, bool has_f32 = true);
  /// Keeps the first `elements` in `dtype` only, and what is read in f32 in any case.
  static Weights make_first(const Exec& exec, const ModelLayout& layout, DType dtype,
                            int64_t elements);
  const WeightViews& views() const { return views_; }
  /// Views of a range in the flat array; without `f32` and `working` past the first elements, if
  /// only those are kept.
  WeightViews views(FlatRange range) const;
  /// Bytes of memory.
  size_t bytes() const { return f32_.bytes() + working_.bytes() + exact_.bytes(); }
  /// f32 [elements]; without data if there is none.
  const Tensor& values() const { return views_.f32; }
  /// Matrix in the working dtype; without data if it is not kept.
  Tensor matrix(const WeightMatrix& m) const;
  /// Position of a matrix's first element in the flat array.
  int64_t offset_of(const Tensor& matrix) const;
  /// Router in f32, regardless of the working dtype.
  Tensor router(const WeightMatrix& m) const;
  /// `count` elements in f32 from `offset` in the flat array: a norm's gains or a router's bias.
  Tensor vector(int64_t offset, int64_t count) const { return views_.in_f32({offset, count}); }
  /// Sets the weights of `range` to `values`, f32 [range.count], which may be their f32 memory.
  void set(FlatRange range, const Tensor& values);
  /// Updates the working dtype after values() was written to.
  void refresh() { set({0, views_.elements()}, views_.f32); }
  /// Writes the weights as they are read, f32 [elements].
  void read(const Tensor& to) const;

 private:
  struct Storage {
    bool all_in_f32;
    int64_t elements;  ///< first ones, in `dtype`
  };
  Weights(const Exec& exec, const ModelLayout& layout, DType dtype, Storage stored);
  void make_exact();

  Exec exec_;
  DType dtype_;
  Memory f32_, working_, exact_;
  std::vector<ExactRange> exact_ranges_;
  WeightViews views_;
};

}  // namespace tandem
