#include "overlap/moe/rows.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <utility>

#include "core/operands.h"
#include "core/system/printable.h"
#include "overlap/moe/activation.h"
#include "overlap/moe/quantization.h"
#include "tandem/collectives.h"
#include "tandem/error.h"

namespace tandem {

using namespace schedule;

std::string_view name_of(MoeSave save) {
  switch (save) {
    case MoeSave::sorted:
      return "sorted";
    case MoeSave::rows:
      return "rows";
    case MoeSave::recompute:
      return "recompute";
  }
  return "?";
}

MoeSave parse_moe_save(std::string_view name) {
  for (const MoeSave save : {MoeSave::sorted, MoeSave::rows, MoeSave::recompute}) {
    if (name == name_of(save)) return save;
  }
  throw InvalidArgument(
      fmt::format("moe: save '{}': expected sorted, rows or recompute", printable(name)));
}

std::string saves(MoeSave save) {
  switch (save) {
    case MoeSave::sorted:
      break;
    case MoeSave::rows:
      return " saving rows";
    case MoeSave::recompute:
      return " recomputing";
  }
  return "";
}

std::string quantizes(const MoeOptions& options) {
  if (!options.quantization) return "";
  return options.quantization->has_scales ? " in e4m3" : " in e4m3 without scales";
}

std::string activates(const MoeOptions& options) {
  if (!options.activation || options.activation->clamp.limit <= 0) return "";
  const auto& [limit, alpha] = options.activation->clamp;
  return fmt::format(" clamped at {}, alpha {}", limit, alpha);
}

Tensor GrowingTensor::of(DType dtype, int64_t rows, int64_t columns) {
  const size_t bytes = size_t(rows * columns) * size_of(dtype);
  if (bytes > memory_.bytes()) memory_ = Memory(bytes + bytes / 4);
  return memory_.view(dtype, {rows, columns});
}
Tensor GrowingTensor::view(DType dtype, int64_t rows, int64_t columns) const {
  return memory_.view(dtype, {rows, columns});
}

MoeRankCoords::MoeRankCoords(const Communicator& comm, const MoeShape& s)
    : shape(s), rank(comm.rank()), world(comm.size()) {
  const auto reject = [](const char* what, int64_t value, const std::string& expected) {
    throw InvalidArgument(fmt::format("moe: {} {}: expected {}", what, value, expected));
  };
  constexpr int64_t kMax = int64_t(1) << 30;
  if (s.tokens < 0 || s.tokens > kMax) reject("tokens", s.tokens, "0 to 2^30");
  if (s.hidden < 1 || s.hidden > kMax) reject("hidden", s.hidden, "1 to 2^30");
  if (s.ffn < 1 || s.ffn > kMax) reject("ffn", s.ffn, "1 to 2^30");
  if (s.experts < 1 || s.experts > 1 << 16) reject("experts", s.experts, "1 to 65536");
  if (s.tp < 1 || world % s.tp != 0) {
    reject("tp", s.tp, fmt::format("a divisor of the communicator's size {}", world));
  }
  grid = {s.experts, world / s.tp, s.tp};
  if (s.experts % grid.ep != 0) {
    reject("experts", s.experts, fmt::format("a multiple of ep = {}", grid.ep));
  }
  if (s.top_k < 1 || s.top_k > s.experts) {
    reject("top_k", s.top_k, fmt::format("1 to experts = {}", s.experts));
  }
  const DType other = comm.on_gpu() ? DType::f16 : DType::f32;
  if (s.dtype != DType::bf16 && s.dtype != other) {
    throw InvalidArgument(fmt::format("moe: dtype {}: expected {}", name_of(s.dtype),
                                      comm.on_gpu() ? "bf16 or f16 on GPUs" : "f32 or bf16"));
  }
  experts = grid.local(rank);
  ffn = shard_of(s.ffn, s.tp, rank % s.tp).count;
  row_bytes = size_t(s.hidden) * size_of(s.dtype);
}

int64_t MoeRankCoords::usual_rows() const {
  return world * shape.tokens * shape.top_k * experts.count / shape.experts;
}

std::string MoeRankCoords::describe() const {
  return fmt::format("tokens {} hidden {} ffn {} experts {} top-k {} ep {} tp {} {}", shape.tokens,
                     shape.hidden, shape.ffn, shape.experts, shape.top_k, grid.ep, grid.tp,
                     name_of(shape.dtype));
}

std::string MoeRows::fault_of(const MoeRankCoords& coords, const MoeRouting& routing) {
  const int k = coords.shape.top_k;
  for (int64_t row = 0; row < routing.experts.dim(0); ++row) {
    const int32_t* experts = routing.experts.as<int32_t>() + row * k;
    const float* weights = routing.weights.as<float>() + row * k;
    for (int i = 0; i < k; ++i) {
      if (experts[i] == -1) continue;
      if (experts[i] < 0 || experts[i] >= coords.shape.experts) {
        return fmt::format("row {} goes to expert {}: expected 0 to {}, or -1 for none", row,
                           experts[i], coords.shape.experts - 1);
      }
      if (!std::isfinite(weights[i])) {
        return fmt::format(
            "row {} has the weight {} for expert {}: expected a finite number "
            "(are the router's logits?)",
            row, weights[i], experts[i]);
      }
      for (int j = 0; j < i; ++j) {
        if (experts[i] == experts[j]) {
          return fmt::format("row {} goes to expert {} twice: expected different ones", row,
                             experts[i]);
        }
      }
    }
  }
  return "";
}

void MoeRows::list_sent(const MoeRankCoords& coords, const MoeRouting& routing) {
  const int k = coords.shape.top_k, world = coords.world;
  local_rows_ = routing.experts.dim(0);
  sent_.resize(size_t(world));
  for (auto& rows : sent_) rows.clear();
  loads_.assign(size_t(coords.grid.ep), 0);
  copies_.clear();
  copy_begin_.assign(1, 0);
  std::vector<char> token_in_rank(size_t(coords.world));
  for (int64_t row = 0; row < local_rows_; ++row) {
    std::fill(token_in_rank.begin(), token_in_rank.end(), 0);
    const int32_t* experts = routing.experts.as<int32_t>() + row * k;
    for (int i = 0; i < k; ++i) {
      if (experts[i] < 0) continue;
      const int first = coords.grid.holder(experts[i]);
      std::fill_n(token_in_rank.begin() + first, coords.grid.tp, 1);
      ++loads_[size_t(first / coords.grid.tp)];
    }
    for (int rank = 0; rank < world; ++rank) {
      if (!token_in_rank[size_t(rank)]) continue;
      auto& rows = sent_[size_t(rank)];
      copies_.push_back({rank, int32_t(rows.size())});
      rows.push_back(int32_t(row));
    }
    copy_begin_.push_back(int64_t(copies_.size()));
  }
}

std::span<const MoeRows::RowCopy> MoeRows::copies(int64_t row) const {
  const auto begin = size_t(copy_begin_[size_t(row)]), end = size_t(copy_begin_[size_t(row) + 1]);
  return std::span(copies_).subspan(begin, end - begin);
}

std::span<const MoeUse> MoeRows::uses(int source, int64_t row) const {
  const size_t at = size_t(arrivals_[size_t(source)].first_use + row);
  return std::span(uses_).subspan(size_t(use_begin_[at]),
                                  size_t(use_begin_[at + 1] - use_begin_[at]));
}

Range MoeRows::slots_of(int expert, Range groups) const {
  const size_t at = size_t(expert) * kGroups;
  const int64_t begin = group_slots_[at + size_t(groups.begin)];
  const int64_t end = groups.end() == kGroups
                          ? expert_slots_[size_t(expert)] + expert_rows_[size_t(expert)]
                          : group_slots_[at + size_t(groups.end())];
  return {begin, end - begin};
}

void MoeRows::list_arrived(const MoeRankCoords& coords, std::span<const RoutedRows> sources) {
  const int k = coords.shape.top_k, world = coords.world;
  const size_t entry = routed_bytes(k);
  const auto local = size_t(coords.experts.count);
  // Calls body(group, expert, use) in the order of slots within (expert, group).
  const auto for_each = [&](const auto& body) {
    for (int step = 0; step < world; ++step) {
      const int source = moe_source(coords.rank, world, step);
      const RoutedRows& routed = sources[size_t(source)];
      for (int64_t row = 0; row < routed.rows; ++row) {
        const std::byte* at = routed.entries + size_t(row) * entry;
        const int group = step == 0 ? 0 : 1 + moe_wave_of(routed.rows, row);
        for (int i = 0; i < k; ++i) {
          int32_t expert;
          float weight;
          std::memcpy(&expert, at + size_t(i) * sizeof expert, sizeof expert);
          std::memcpy(&weight, at + size_t(k) * sizeof expert + size_t(i) * sizeof weight,
                      sizeof weight);
          const int64_t local_expert = expert - coords.experts.begin;
          if (local_expert < 0 || local_expert >= coords.experts.count) continue;
          body(source, row, size_t(local_expert) * kGroups + size_t(group), i, weight);
        }
      }
    }
  };
  std::vector<int64_t> next(local * kGroups, 0);
  arrivals_.assign(size_t(world), {});
  int64_t rows = 0, uses = 0;
  for (int source = 0; source < world; ++source) {
    arrivals_[size_t(source)] = {sources[size_t(source)].rows, rows};
    rows += sources[size_t(source)].rows;
  }
  use_begin_.assign(size_t(rows) + 1, 0);
  for_each([&](int source, int64_t row, size_t group, int, float) {
    ++next[group];
    ++use_begin_[size_t(arrivals_[size_t(source)].first_use + row) + 1];
    ++uses;
  });
  for (size_t i = 0; i < size_t(rows); ++i) use_begin_[i + 1] += use_begin_[i];
  group_slots_.resize(local * kGroups);
  expert_slots_.resize(local + 1);
  expert_rows_.resize(local);
  int64_t slot = 0;
  for (size_t i = 0; i < local * kGroups; ++i) {
    if (i % kGroups == 0) expert_slots_[i / kGroups] = slot;
    group_slots_[i] = slot;
    slot += std::exchange(next[i], slot);
    if (i % kGroups + 1 == kGroups) expert_rows_[i / kGroups] = slot - expert_slots_[i / kGroups];
  }
  expert_slots_[local] = slot;
  uses_.resize(size_t(uses));
  weights_.resize(size_t(uses));
  std::vector<int64_t> fill(use_begin_.begin(), use_begin_.end());
  for_each([&](int source, int64_t row, size_t group, int i, float weight) {
    const int64_t at = fill[size_t(arrivals_[size_t(source)].first_use + row)]++;
    const int64_t to = next[group]++;
    uses_[size_t(at)] = {int32_t(to), int32_t(i), weight};
    weights_[size_t(to)] = weight;
  });
}

void require_moe_apart(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                       const Tensor& w_out, const Tensor& out) {
  require_apart("moe", {{"out", &out}},
                {{"x", &x},
                 {"routing.experts", &routing.experts},
                 {"routing.weights", &routing.weights},
                 {"w_in", &w_in},
                 {"w_out", &w_out}});
}

}  // namespace tandem
