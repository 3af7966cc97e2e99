// Conversion of a fused kernel's tile records to events, on synthetic records.
#include "observe/tile_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "tandem/error.h"

namespace tandem {
namespace {

constexpr uint64_t kBase = (uint64_t(5) << 32) - 2500;  // the low word wraps during the call
constexpr TileGrid kGrid{8, 3, 2, 4};                   // rank 2 of 4, two rows of tiles per shard

uint32_t low(int ns) {
  return uint32_t(kBase + uint64_t(ns));
}
int64_t since_base(TimePoint t) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch());
  return ns.count() - int64_t(kBase);
}

// Tile t is stored from 400 t + 200 to 400 t + 300 and so on.
std::vector<TileRecord> made_up(bool gather) {
  std::vector<TileRecord> records;
  for (int tile = 0; tile < kGrid.tiles(); ++tile) {
    const int t = 400 * tile;
    const bool is_local = kGrid.shard_of(tile) == kGrid.rank;
    TileRecord r{};
    r.products = r.stores = 1;
    r.processor = uint32_t(tile % 5);
    r.product_begin = low(t + 100), r.product_end = low(t + 200);
    r.store_begin = low(t + 200), r.store_end = low(t + 300);
    if (gather && !is_local) r.waits = 1, r.wait_begin = low(t), r.wait_end = low(t + 50);
    if (!gather && (is_local || tile == 0))
      r.stalled_begin = low(t + 220), r.stalled_end = low(t + 280);
    if (!gather && !is_local) r.wait_begin = low(t + 290), r.wait_end = low(t + 900);
    records.push_back(r);
  }
  return records;
}

std::map<SpanKind, std::vector<SpanEvent>> by_kind(const std::vector<SpanEvent>& events) {
  std::map<SpanKind, std::vector<SpanEvent>> kinds;
  for (const SpanEvent& event : events) kinds[event.kind].push_back(event);
  return kinds;
}

void expect_event(const SpanEvent& event, int tile, int begin, int end, int peer) {
  EXPECT_EQ(event.tile, tile);
  EXPECT_EQ(event.processor, tile % 5);
  EXPECT_EQ(event.peer, peer);
  EXPECT_EQ(since_base(event.begin), 400 * tile + begin);
  EXPECT_EQ(since_base(event.end), 400 * tile + end);
}

TEST(TileRecord, GatherTilesWaitForRemoteShards) {
  auto kinds = by_kind(gather_spans(made_up(true), kGrid, kBase));
  ASSERT_EQ(kinds[SpanKind::wait].size(), 18u);  // none for the two local rows of three tiles
  ASSERT_EQ(kinds[SpanKind::gemm].size(), 24u);
  ASSERT_EQ(kinds[SpanKind::compute].size(), 24u);
  expect_event(kinds[SpanKind::wait][17], 23, 0, 50, 3);
  expect_event(kinds[SpanKind::wait][0], 0, 0, 50, 0);
  expect_event(kinds[SpanKind::gemm][13], 13, 100, 200, -1);
  expect_event(kinds[SpanKind::compute][23], 23, 200, 300, -1);
}

TEST(TileRecord, ScatterTilesAreSentToOwnersAndLocalOnesAdded) {
  auto kinds = by_kind(scatter_spans(made_up(false), kGrid, kBase));
  ASSERT_EQ(kinds[SpanKind::gemm].size(), 24u);
  ASSERT_EQ(kinds[SpanKind::transfer].size(), 18u);
  ASSERT_EQ(kinds[SpanKind::wait].size(), 7u);  // six local tiles, and the first to be sent
  // Remote tiles into the send buffer, local ones before and after the wait.
  ASSERT_EQ(kinds[SpanKind::compute].size(), 18u + 12u);
  expect_event(kinds[SpanKind::wait][0], 0, 220, 280, 0);
  expect_event(kinds[SpanKind::transfer][0], 0, 290, 900, 0);
  expect_event(kinds[SpanKind::transfer][17], 23, 290, 900, 3);
  expect_event(kinds[SpanKind::compute][11], 11, 200, 300, -1);
  expect_event(kinds[SpanKind::compute][12], 12, 200, 220, -1);
  expect_event(kinds[SpanKind::wait][1], 12, 220, 280, -1);
  expect_event(kinds[SpanKind::compute][13], 12, 280, 300, -1);
}

TEST(TileRecord, ScatterTilesMayBeSentAtOnceAndWaitDuringTheGemm) {
  auto records = made_up(false);
  for (int tile = 0; tile < kGrid.tiles(); ++tile) {
    TileRecord& r = records[size_t(tile)];
    const int t = 400 * tile;
    const bool is_local = kGrid.shard_of(tile) == kGrid.rank;
    if (!is_local) r.store_begin = r.store_end = r.stalled_begin = r.stalled_end = 0;
    if (is_local) r.stalled_begin = low(t + 150), r.stalled_end = low(t + 190);
  }
  auto kinds = by_kind(scatter_spans(records, kGrid, kBase));
  ASSERT_EQ(kinds[SpanKind::transfer].size(), 18u);
  ASSERT_EQ(kinds[SpanKind::wait].size(), 6u);
  ASSERT_EQ(kinds[SpanKind::compute].size(), 6u);
  expect_event(kinds[SpanKind::transfer][0], 0, 290, 900, 0);
  expect_event(kinds[SpanKind::wait][0], 12, 150, 190, -1);
  expect_event(kinds[SpanKind::compute][0], 12, 200, 300, -1);
}

TEST(TileRecord, TilesNotRecordedExactlyOnceAreNamed) {
  const auto message = [](bool gather, const std::function<void(std::vector<TileRecord>&)>& harm) {
    auto records = made_up(gather);
    harm(records);
    try {
      (gather ? gather_spans : scatter_spans)(records, kGrid, kBase);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("nothing thrown");
  };
  using testing::HasSubstr;
  for (const bool gather : {false, true}) {
    EXPECT_THAT(message(gather, [](auto& r) { r[7].products = 2; }),
                HasSubstr("tile 7 (row 2, column 1)"));
    EXPECT_THAT(message(gather, [](auto& r) { r[23] = {}; }),
                HasSubstr("tile 23 (row 7, column 2)"));
    EXPECT_THAT(message(gather, [](auto& r) { r[0].stores = 0; }), HasSubstr("0 stores"));
    EXPECT_THAT(message(gather, [](auto& r) { r.pop_back(); }), HasSubstr("23 records"));
    EXPECT_THAT(message(gather, [](auto& r) { r[13].waits += 1; }), HasSubstr("tile 13"));
    EXPECT_EQ(message(gather, [](auto&) {}), "nothing thrown");
  }
}

}  // namespace
}  // namespace tandem
