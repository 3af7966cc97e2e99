#include "engine/model/weights.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/elementwise.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Casts f32 values, on the host or on exec's device, to a dtype on exec's device.
void cast_from(const Exec& exec, const Tensor& from, const Tensor& to) {
  if (from.device() == to.device()) return cast(exec, from, to);
  constexpr int64_t kSlice = int64_t{1} << 26;
  const int64_t elements = from.elements();
  const Memory memory(size_t(std::min(kSlice, elements)) * sizeof(float), exec.device);
  for (int64_t begin = 0; begin < elements; begin += kSlice) {
    const int64_t count = std::min(kSlice, elements - begin);
    const Tensor slice = memory.view(DType::f32, {count});
    copy(exec, from.narrow(0, begin, count), slice);
    cast(exec, slice, to.narrow(0, begin, count));
  }
  wait(exec);  // before the memory is freed
}

/// Parameters that are read in f32: vectors, and those replicated over the TP ranks. Adjacent ones
/// are merged.
std::vector<ExactRange> make_exact_ranges(const ModelLayout& layout) {
  std::vector<FlatRange> found;
  for (const Parameter& p : layout.parameters) {
    const bool is_exact = p.shape.size() == 1 || !p.sharding.over_tp();
    if (is_exact && !p.sharding.absent) found.push_back(local_range(p));
  }
  std::ranges::sort(found, {}, &FlatRange::begin);
  constexpr int64_t kAligned = 64;  // elements
  std::vector<ExactRange> ranges;
  for (const FlatRange& range : found) {
    if (range.count == 0) continue;
    if (!ranges.empty() && ranges.back().begin + ranges.back().count == range.begin) {
      ranges.back().count += range.count;
      continue;
    }
    const int64_t end = ranges.empty() ? 0 : ranges.back().position + ranges.back().count;
    ranges.push_back({range.begin, range.count, (end + kAligned - 1) / kAligned * kAligned});
  }
  return ranges;
}

/// Calls visit(range, position) for what of each exact range is in `range`.
template <typename Visit>
void for_each_exact(std::span<const ExactRange> ranges, FlatRange range, Visit&& visit) {
  for (const ExactRange& exact : ranges) {
    const int64_t begin = std::max(exact.begin, range.begin);
    const int64_t count = std::min(exact.begin + exact.count, range.end()) - begin;
    if (count > 0) visit(FlatRange{begin, count}, exact.position + begin - exact.begin);
  }
}

}  // namespace

size_t WeightViews::bytes() const {
  size_t bytes = 0;
  for (const Tensor& view : {f32, working, exact}) bytes += view.data() ? view.bytes() : 0;
  return bytes;
}

Tensor WeightViews::in_f32(FlatRange range) const {
  if (f32.data()) return f32.narrow(0, range.begin, range.count);
  if (range.count == 0) return Tensor(nullptr, DType::f32, {0}, working.device());
  const auto after = std::ranges::upper_bound(exact_ranges, range.begin, {}, &ExactRange::begin);
  if (after != exact_ranges.begin()) {
    const ExactRange& found = *std::prev(after);
    if (range.end() <= found.begin + found.count) {
      return exact.narrow(0, found.position + range.begin - found.begin, range.count);
    }
  }
  throw InvalidArgument(fmt::format("weights {} to {}: expected weights that are kept in f32",
                                    range.begin, range.end()));
}

WeightViews WeightViews::narrow(FlatRange range) const {
  WeightViews views;
  if (f32.data()) views.f32 = f32.narrow(0, range.begin, range.count);
  if (working.data()) views.working = working.narrow(0, range.begin, range.count);
  for_each_exact(exact_ranges, range, [&](FlatRange slice, int64_t position) {
    views.exact_ranges.push_back({slice.begin - range.begin, slice.count, position});
  });
  if (views.exact_ranges.empty()) return views;
  const ExactRange &first = views.exact_ranges.front(), &last = views.exact_ranges.back();
  const int64_t begin = first.position;
  views.exact = exact.narrow(0, begin, last.position + last.count - begin);
  for (ExactRange& slice : views.exact_ranges) slice.position -= begin;
  return views;
}

Weights::Weights(const Exec& exec, const ModelLayout& layout, DType dtype, bool has_f32)
    : Weights(exec, layout, dtype, Storage{has_f32, layout.size}) {}

Weights Weights::make_first(const Exec& exec, const ModelLayout& layout, DType dtype,
                            int64_t elements) {
  return Weights(exec, layout, dtype, Storage{false, elements});
}

Weights::Weights(const Exec& exec, const ModelLayout& layout, DType dtype, Storage stored)
    : exec_(exec), dtype_(dtype), exact_ranges_(make_exact_ranges(layout)) {
  if (dtype != DType::f32 && dtype != DType::bf16) {
    throw InvalidArgument("model dtype " + std::string(name_of(dtype)) + ": expected f32 or bf16");
  }
  const auto make = [&](DType type, int64_t elements) {
    return Memory(size_t(elements) * size_of(type), exec.device);
  };
  if (dtype != DType::f32) working_ = make(dtype, stored.elements);
  if (dtype == DType::f32 || stored.all_in_f32) f32_ = make(DType::f32, stored.elements);
  if (stored.elements == layout.size) {
    if (f32_.data()) views_.f32 = f32_.view(DType::f32, {layout.size});
    if (working_.data()) views_.working = working_.view(dtype, {layout.size});
  }
  if (!views_.f32.data()) make_exact();
}

WeightViews Weights::views(FlatRange range) const {
  WeightViews views = views_.narrow(range);
  const Memory& memory = dtype_ == DType::f32 ? f32_ : working_;
  const size_t begin = size_t(range.begin) * size_of(dtype_);
  const bool has_all = views_.f32.data() || views_.working.data();
  if (has_all || begin + size_t(range.count) * size_of(dtype_) > memory.bytes()) return views;
  (dtype_ == DType::f32 ? views.f32 : views.working) = memory.view(dtype_, {range.count}, begin);
  return views;
}

void Weights::make_exact() {
  if (exact_ranges_.empty()) return;
  views_.exact_ranges = exact_ranges_;
  const ExactRange& last = exact_ranges_.back();
  const int64_t elements = last.position + last.count;
  exact_ = Memory(size_t(elements) * sizeof(float), exec_.device);
  views_.exact = exact_.view(DType::f32, {elements});
}

Tensor Weights::matrix(const WeightMatrix& m) const {
  const Memory& memory = dtype_ == DType::f32 ? f32_ : working_;
  if (size_t(m.offset + m.rows * m.columns) * size_of(dtype_) > memory.bytes()) {
    return Tensor(nullptr, dtype_, {m.rows, m.columns}, memory.device());
  }
  return memory.view(dtype_, {m.rows, m.columns}, size_t(m.offset) * size_of(dtype_));
}

int64_t Weights::offset_of(const Tensor& matrix) const {
  const Memory& memory = dtype_ == DType::f32 ? f32_ : working_;
  const std::byte* const begin = memory.view(dtype_, {0}).as<std::byte>();
  return (matrix.as<std::byte>() - begin) / int64_t(size_of(dtype_));
}

Tensor Weights::router(const WeightMatrix& m) const {
  const Tensor flat = vector(m.offset, m.rows * m.columns);
  return Tensor(flat.data(), DType::f32, {m.rows, m.columns}, flat.device());
}

void Weights::set(FlatRange range, const Tensor& values) {
  if (range.count == 0) return;
  const WeightViews views = views_.narrow(range);
  if (views.f32.data() && views.f32.data() != values.data()) copy(exec_, values, views.f32);
  if (views.working.data()) cast_from(exec_, values, views.working);
  for (const ExactRange& slice : views.exact_ranges) {
    copy(exec_, values.narrow(0, slice.begin, slice.count),
         views.exact.narrow(0, slice.position, slice.count));
  }
}

void Weights::read(const Tensor& to) const {
  if (!views_.working.data()) return copy(exec_, views_.f32, to);
  cast(exec_, views_.working, to);
  for (const ExactRange& slice : exact_ranges_) {
    copy(exec_, vector(slice.begin, slice.count), to.narrow(0, slice.begin, slice.count));
  }
}

}  // namespace tandem
