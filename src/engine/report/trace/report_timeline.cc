#include <utility>

#include "engine/report/report_data.h"
#include "engine/report/trace/layer.h"

namespace tandem::report {
namespace {

double us(std::chrono::nanoseconds t) {
  return double(t.count()) / 1e3;
}

}  // namespace

Json layer_timeline(std::span<const RankEvents> ranks) {
  Layer layer = one_layer(ranks);
  for (RankEvents& rank : layer.ranks) {  // their spans are shown
    std::erase_if(rank.events, [](const SpanEvent& e) { return e.kind == SpanKind::pass; });
  }
  Json timeline{{"span_us", us(layer.span)}, {"ranks", Json::array()}, {"arrows", Json::array()}};
  if (layer.ranks.empty()) timeline["span_us"] = 0;
  for (const RankEvents& rank : layer.ranks) {
    const std::vector<int> rows = lane_rows(rank.events);
    Json slices = Json::array();
    for (size_t i = 0; i < rank.events.size(); ++i) {
      const SpanEvent& event = rank.events[i];
      slices.push_back({{"kind", name_of(event.kind)},
                        {"name", event.name},
                        {"begin", us(event.begin.time_since_epoch())},
                        {"end", us(event.end.time_since_epoch())},
                        {"tile", event.tile},
                        {"peer", event.peer},
                        {"row", rows[i]}});
    }
    timeline["ranks"].push_back({{"rank", rank.rank}, {"slices", std::move(slices)}});
  }
  for (const Arrow& arrow : arrows(layer.ranks)) {
    timeline["arrows"].push_back({{"from", arrow.from},
                                  {"transfer", arrow.transfer},
                                  {"to", arrow.to},
                                  {"wait", arrow.wait}});
  }
  return timeline;
}

}  // namespace tandem::report
