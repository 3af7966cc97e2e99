#include "engine/model/gradient_memory.h"

#include <algorithm>
#include <utility>

namespace tandem {

int64_t assign_units(std::span<GradientUnit> units, int64_t bucket_elements, int64_t begin) {
  int64_t end = begin;
  for (size_t i = 0; i < units.size(); ++i) {
    GradientUnit& unit = units[i];
    // Elements from here on are in complete buckets when the unit is begun, even if the one before
    // is not finished.
    const int64_t complete =
        i < 2 ? std::numeric_limits<int64_t>::max() : units[i - 2].range.begin + bucket_elements;
    const auto is_free = [&](const GradientUnit& other) {
      return other.is_shared && unit.is_shared && other.range.begin >= complete;
    };
    int64_t position = begin;
    for (bool moved = true; std::exchange(moved, false);) {
      for (const GradientUnit& other : units.first(i)) {
        if (is_free(other) || other.position + other.range.count <= position ||
            other.position >= position + unit.range.count) {
          continue;
        }
        position = other.position + other.range.count;
        moved = true;
      }
    }
    unit.position = position;
    for (const GradientUnit& other : units.first(i)) {
      if (other.position < position + unit.range.count &&
          position < other.position + other.range.count) {
        unit.sent_from = std::min(unit.sent_from, other.range.begin);
      }
    }
    end = std::max(end, position + unit.range.count);
  }
  return end - begin;
}

size_t gradient_sum_bytes(const ModelLayout& layout, const ModelConfig& config, int64_t tp,
                          bool is_head_by_rows) {
  int64_t largest = std::max(config.hidden, 2 * config.head_dim);
  const auto add = [&](const WeightMatrix& m) { largest = std::max(largest, m.rows * m.columns); };
  if (tp > 1 || is_head_by_rows) add(layout.head);
  for (const BranchLayout& branch : layout.branches) {
    if (branch.moe) add(branch.router);
    if (branch.moe) add(branch.experts_bias);
    if (tp > 1) add(branch.in);
  }
  return size_t(largest) * sizeof(float);
}

GradientLayout assign_gradients(const ModelLayout& layout, const ModelConfig& config,
                                const GradientWindow& window) {
  GradientLayout assigned;
  if (!window.dense && !window.experts) {
    assigned.elements = layout.size;
    return assigned;
  }
  std::vector<GradientUnit> group;
  const auto assign = [&](bool is_window, FlatRange range) {
    std::erase_if(group, [](const GradientUnit& unit) { return unit.range.count == 0; });
    if (!is_window) group = {{.range = range, .is_window = false, .is_shared = false}};
    assigned.elements += assign_units(group, window.bucket_elements, assigned.elements);
    assigned.units.insert(assigned.units.end(), group.begin(), group.end());
    group.clear();
  };
  const auto descend = [&](const std::vector<int64_t>& begins, int64_t end) {
    for (auto begin = begins.rbegin(); begin != begins.rend(); ++begin) {
      group.push_back({.range = {*begin, end - *begin}, .is_shared = window.every_pass});
      end = *begin;
    }
  };
  std::vector<int64_t> begins{0}, experts;
  for (size_t i = 0; i < layout.branches.size(); ++i) {
    if (i % size_t(layout.branches_per_layer) == 0) begins.push_back(layout.branches[i].begin);
    if (layout.branches[i].moe) experts.push_back(layout.branches[i].experts_in.offset);
  }
  begins.push_back(layout.final_norm);
  descend(begins, layout.experts_begin);
  // A tied embedding is written by the head first and by its lookups last.
  if (config.tie_word_embeddings) group.back().is_shared = false;
  assign(window.dense, {0, layout.experts_begin});
  descend(experts, layout.experts_end);
  if (!experts.empty()) assign(window.experts, layout.experts());
  return assigned;
}

GradientMemory::GradientMemory(const Exec& exec, GradientLayout assigned, DType dtype)
    : dtype_(dtype),
      memory_(size_t(assigned.elements) * size_of(dtype), exec.device),
      units_(std::move(assigned.units)),
      is_live_(units_.size()) {
  std::ranges::sort(units_, {}, [](const GradientUnit& unit) { return unit.range.begin; });
  if (units_.empty()) values_ = memory_.view(dtype, {assigned.elements});
}

size_t GradientMemory::find(int64_t offset) const {
  const auto after = std::ranges::upper_bound(
      units_, offset, {}, [](const GradientUnit& unit) { return unit.range.begin; });
  return size_t(after - units_.begin()) - 1;
}

Tensor GradientMemory::at(int64_t offset, int64_t count) const {
  if (is_flat()) return values_.narrow(0, offset, count);
  const GradientUnit& unit = units_[find(offset)];
  const int64_t position = count == 0 ? 0 : unit.position + offset - unit.range.begin;
  return memory_.view(dtype_, {count}, size_t(position) * size_of(dtype_));
}

void GradientMemory::for_each(
    FlatRange range,
    const std::function<void(FlatRange range, const Tensor& values)>& visit) const {
  if (is_flat()) return visit(range, at(range.begin, range.count));
  for (int64_t begin = range.begin; begin < range.end();) {
    const int64_t end = std::min(range.end(), units_[find(begin)].range.end());
    visit({begin, end - begin}, at(begin, end - begin));
    begin = end;
  }
}

bool GradientMemory::begin_write(int64_t offset) {
  if (!is_flat()) {
    const size_t index = find(offset);
    if (units_[index].is_window && !is_live_[index] && make_room_) make_room_(units_[index]);
    is_live_[index] = true;
  }
  return !written_.insert(offset).second;
}

void GradientMemory::end(FlatRange unit) {
  is_live_[find(unit.begin)] = false;
  std::erase_if(written_,
                [&](int64_t offset) { return offset >= unit.begin && offset < unit.end(); });
}

}  // namespace tandem
