#include "observe/tile_record.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {
namespace {

class Spans {
 public:
  Spans(std::span<const TileRecord> records, const TileGrid& grid, const char* name,
        uint64_t base_ns)
      : records_(records), grid_(grid), name_(name), base_ns_(base_ns) {
    if (records.size() != size_t(grid.tiles())) {
      throw InvalidArgument(fmt::format("timeline: {} records: expected {} x {} tiles",
                                        records.size(), grid.rows, grid.columns));
    }
  }
  void check_once(int tile, uint32_t waits) const {
    const TileRecord& r = records_[size_t(tile)];
    if (r.waits == waits && r.products == 1 && r.stores == 1) return;
    throw InvalidArgument(
        fmt::format("timeline: {} tile {} (row {}, column {}): {} waits, {} products, {} stores: "
                    "expected {}, 1 and 1",
                    name_, tile, tile / grid_.columns, tile % grid_.columns, r.waits, r.products,
                    r.stores, waits));
  }
  void add(SpanKind kind, int tile, uint32_t begin, uint32_t end, int peer = -1) {
    if (begin == end) return;
    events_.push_back(
        {kind, name_, time(begin), time(end), tile, peer, int(records_[size_t(tile)].processor)});
  }
  std::vector<SpanEvent> take() { return std::move(events_); }

 private:
  // The low words wrap every four seconds: use the signed distance from the base.
  TimePoint time(uint32_t low) const {
    const int64_t since = int32_t(low - uint32_t(base_ns_));
    return TimePoint(std::chrono::nanoseconds(int64_t(base_ns_) + since));
  }

  std::span<const TileRecord> records_;
  TileGrid grid_;
  const char* name_;
  uint64_t base_ns_;
  std::vector<SpanEvent> events_;
};

}  // namespace

std::vector<SpanEvent> gather_spans(std::span<const TileRecord> records, const TileGrid& grid,
                                    uint64_t base_ns) {
  Spans spans(records, grid, "ag_gemm", base_ns);
  for (int tile = 0; tile < grid.tiles(); ++tile) {
    const TileRecord& r = records[size_t(tile)];
    const int source = grid.shard_of(tile);
    spans.check_once(tile, source == grid.rank ? 0 : 1);
    spans.add(SpanKind::wait, tile, r.wait_begin, r.wait_end, source);
    spans.add(SpanKind::gemm, tile, r.product_begin, r.product_end);
    spans.add(SpanKind::compute, tile, r.store_begin, r.store_end);
  }
  return spans.take();
}

std::vector<SpanEvent> scatter_spans(std::span<const TileRecord> records, const TileGrid& grid,
                                     uint64_t base_ns) {
  Spans spans(records, grid, "gemm_rs", base_ns);
  for (int tile = 0; tile < grid.tiles(); ++tile) {
    const TileRecord& r = records[size_t(tile)];
    const int owner = grid.shard_of(tile);
    const bool stalled = r.stalled_begin != r.stalled_end;
    const bool in_epilogue = stalled && int32_t(r.stalled_begin - r.store_begin) >= 0;
    spans.check_once(tile, 0);
    spans.add(SpanKind::gemm, tile, r.product_begin, r.product_end);
    if (owner != grid.rank) {
      spans.add(SpanKind::compute, tile, r.store_begin, r.store_end);
      if (stalled) spans.add(SpanKind::wait, tile, r.stalled_begin, r.stalled_end, owner);
      spans.add(SpanKind::transfer, tile, r.wait_begin, r.wait_end, owner);
    } else if (in_epilogue) {
      spans.add(SpanKind::compute, tile, r.store_begin, r.stalled_begin);
      spans.add(SpanKind::wait, tile, r.stalled_begin, r.stalled_end);
      spans.add(SpanKind::compute, tile, r.stalled_end, r.store_end);
    } else {
      if (stalled) spans.add(SpanKind::wait, tile, r.stalled_begin, r.stalled_end);
      spans.add(SpanKind::compute, tile, r.store_begin, r.store_end);
    }
  }
  return spans.take();
}

}  // namespace tandem
