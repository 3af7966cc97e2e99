#include "engine/model/expert_load.h"

#include <algorithm>
#include <span>
#include <utility>

#include "comm/exec.h"
#include "schedule/moe.h"
#include "tandem/collectives.h"

namespace tandem {

std::vector<double> ExpertCounts::of(int layer) const {
  const auto of_layer = std::span(rows).subspan(size_t(layer * experts), size_t(experts));
  return {of_layer.begin(), of_layer.end()};
}

double ExpertCounts::imbalance(int layer, int shards) const {
  const auto c = of(layer);
  std::vector<int64_t> loads(static_cast<size_t>(shards));
  for (size_t e = 0; e < c.size(); ++e) loads[e * loads.size() / c.size()] += int64_t(c[e]);
  return schedule::moe_imbalance(loads.data(), shards);
}

ExpertLoad::ExpertLoad(const Exec& exec, int64_t layers, int64_t experts,
                       std::vector<Communicator*> axes, RoutedRowsSeen seen)
    : exec_(exec),
      layers_(layers),
      experts_(experts),
      axes_(std::move(axes)),
      seen_(std::move(seen)),
      sums_(size_t(layers * router_load_bytes(experts)), exec.device),
      fence_(exec) {
  std::erase_if(axes_, [](const Communicator* axis) { return axis->size() == 1; });
  size_t ranks = 0;
  for (const Communicator* axis : axes_) ranks = std::max(ranks, size_t(axis->size()));
  if (ranks > 0) gathered_ = Memory(ranks * sums_.bytes(), exec.device);
}

Tensor ExpertLoad::layers() const {
  return sums_.view(DType::u8, {layers_, router_load_bytes(experts_)});
}

Tensor ExpertLoad::layer(int layer) const {
  return layers().rows(layer, 1);
}

void ExpertLoad::clear() {
  tandem::clear(exec_, layers());
}

void ExpertLoad::add(int layer, const Tensor& scores, const Tensor& chosen) {
  if (seen_) seen_(layer, scores, chosen);
  add_router_load(exec_, scores, chosen, this->layer(layer));
}

void ExpertLoad::add(const ExpertLoad& other) {
  add_loads(exec_, other.layers(), layers());
}

/// Adds in rank order, so that all ranks have the same bits. An axis may have its own stream.
void ExpertLoad::share() {
  const auto bytes = int64_t(sums_.bytes());
  for (Communicator* axis : axes_) {
    const Tensor all = gathered_.view(DType::u8, {axis->size(), bytes});
    const Exec of_axis = make_exec(*axis);
    fence_.record(exec_);
    fence_.await(of_axis);
    all_gather(*axis, sums_.view(DType::u8, {1, bytes}), all);
    fence_.record(of_axis);
    fence_.await(exec_);
    clear();
    for (int rank = 0; rank < axis->size(); ++rank) add_loads(exec_, all.rows(rank, 1), layers());
  }
}

ExpertCounts ExpertLoad::counts() const {
  const Memory on_host(sums_.bytes());
  copy(exec_, layers(), on_host.view(DType::u8, {layers_, router_load_bytes(experts_)}));
  ExpertCounts result{experts_, {}};
  for (int64_t layer = 0; layer < layers_; ++layer) {
    const auto* const counts =
        reinterpret_cast<const double*>(on_host.data() + layer * router_load_bytes(experts_));
    result.rows.insert(result.rows.end(), counts, counts + experts_);
  }
  return result;
}

}  // namespace tandem
