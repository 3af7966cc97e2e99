#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "schedule/ring.h"
#include "tandem/collectives.h"

namespace tandem::schedule {
namespace {

static_assert(ag_source(2, 4, 3) == 1 && ag_target(2, 4, 3) == 3);
static_assert(rs_owner(2, 4, 3) == 2 && rs_source(0, 4, 0) == 3);
static_assert(split(10, 4, 1).begin == 3 && part_of(10, 4, 3) == 1);
static_assert(chunk_rows(16, 2, 1, 3, 0, Taper::falling).end() == 12);
static_assert(chunk_rows(16, 2, 1, 3, 0, Taper::rising).end() == 10);
static_assert(chunks_of(16, 2, 3, {7, 2}, Taper::falling).last == 3);
static_assert(ag_tile(1, 2, 8, 3, 0) == 2 && rs_tile(0, 2, 8, 3, 0) == 1);
static_assert(rs_ready_after(0, 2, 8, 3, {4, 4}) == 2 && ar_rows(8, 2, 2, 1, 1).begin == 6);
static_assert(ar_rows_before(8, 2, 2, 1, 1) == 2 && ar_rows_bound(8, 2, 4) >= 4);

constexpr int64_t kRows[] = {0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 64, 97, 128, 129};
constexpr int kChunks[] = {1, 2, 3, 4, 8};
constexpr Taper kTapers[] = {Taper::falling, Taper::rising};
constexpr int64_t kTiles[] = {1, 2, 3, 8, 16, 64, 200};

TEST(Split, CoversOnceAndAgreesWithShardOf) {
  for (int parts = 1; parts <= 9; ++parts) {
    for (int64_t total = 0; total < 50; ++total) {
      int64_t next = 0;
      for (int i = 0; i < parts; ++i) {
        const Range part = split(total, parts, i);
        const Shard shard = shard_of(total, parts, i);
        ASSERT_EQ(part.begin, next);
        ASSERT_EQ(part.begin, shard.begin);
        ASSERT_EQ(part.count, shard.count);
        for (int64_t row = part.begin; row < part.end(); ++row) {
          ASSERT_EQ(part_of(total, parts, row), i);
        }
        next = part.end();
      }
      ASSERT_EQ(next, total);
    }
  }
}

TEST(Ring, NoTwoRanksSendToOnePeerAtOneStep) {
  for (int world = 1; world <= 8; ++world) {
    for (int step = 0; step < world; ++step) {
      std::set<int> ag, rs;
      for (int rank = 0; rank < world; ++rank) {
        const int target = ag_target(rank, world, step);
        ASSERT_EQ(ag_source(target, world, step), rank);
        ag.insert(target);
        const int owner = rs_owner(rank, world, step);
        rs.insert(owner);
        if (step + 1 < world) {
          ASSERT_NE(owner, rank);
          ASSERT_EQ(rs_source(owner, world, step), rank);
        } else {
          ASSERT_EQ(owner, rank);
        }
      }
      ASSERT_EQ(int(ag.size()), world);
      ASSERT_EQ(int(rs.size()), world);
    }
    for (int rank = 0; rank < world; ++rank) {
      std::set<int> sources, owners;
      for (int step = 0; step < world; ++step) {
        sources.insert(ag_source(rank, world, step));
        owners.insert(rs_owner(rank, world, step));
      }
      ASSERT_EQ(int(sources.size()), world);
      ASSERT_EQ(int(owners.size()), world);
      ASSERT_EQ(ag_source(rank, world, 0), rank);
    }
  }
}

TEST(Chunks, CoverEveryRowOnce) {
  for (int world = 1; world <= 8; ++world) {
    for (const int64_t m : kRows) {
      for (const int chunks : kChunks) {
        for (const Taper taper : kTapers) {
          int64_t next = 0;
          for (int owner = 0; owner < world; ++owner) {
            for (int chunk = 0; chunk < chunks; ++chunk) {
              const Range rows = chunk_rows(m, world, owner, chunks, chunk, taper);
              ASSERT_EQ(rows.begin, next);
              next = rows.end();
              for (int64_t row = rows.begin; row < rows.end(); ++row) {
                ASSERT_EQ(chunk_of_row(m, world, chunks, row, taper),
                          chunk_id(owner, chunks, chunk));
              }
            }
          }
          ASSERT_EQ(next, m);
        }
      }
    }
  }
}

TEST(Chunks, SizesFallOrRiseByHalves) {
  for (const int64_t rows : {16, 64, 1024, 4096}) {
    for (int chunks = 1; chunks <= 5; ++chunks) {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int64_t expected = rows >> std::min(chunk + 1, chunks - 1);
        ASSERT_EQ(taper_rows(rows, chunks, chunk, Taper::falling).count, expected);
        ASSERT_EQ(taper_rows(rows, chunks, chunks - 1 - chunk, Taper::rising).count, expected);
      }
    }
  }
}

/// Position of a chunk in the order in which chunks become available to `rank` (own ones first).
int arrival(int rank, int world, int chunks, int id) {
  const int owner = id / chunks, chunk = id % chunks;
  return (owner - rank + world) % world * chunks + chunk;
}

template <typename Body>
void for_all_tilings(const Body& body) {
  for (int world = 1; world <= 8; ++world) {
    for (const int64_t m : kRows) {
      if (m == 0) continue;
      for (const int64_t tile_m : kTiles) {
        for (int rank = 0; rank < world; ++rank) {
          SCOPED_TRACE(fmt::format("world {} m {} tile {} rank {}", world, m, tile_m, rank));
          body(world, m, tile_m, rank);
        }
      }
    }
  }
}

TEST(AgTiles, OnceEachAndInArrivalOrder) {
  for_all_tilings([](int world, int64_t m, int64_t tile_m, int rank) {
    const int64_t tiles = tile_count(m, tile_m);
    for (const int chunks : kChunks) {
      std::vector<int> seen(size_t(tiles), 0);
      int latest = -1;
      for (int64_t position = 0; position < tiles; ++position) {
        const int64_t tile = ag_tile(rank, world, m, tile_m, position);
        ++seen[size_t(tile)];
        const Range rows = tile_rows(m, tile_m, tile);
        const ChunkSpan span = chunks_of(m, world, chunks, rows, Taper::falling);
        int needed = -1;
        for (int64_t row = rows.begin; row < rows.end(); ++row) {
          const int id = chunk_of_row(m, world, chunks, row, Taper::falling);
          ASSERT_TRUE(span.first <= id && id <= span.last);
          needed = std::max(needed, arrival(rank, world, chunks, id));
        }
        // A tile never makes later ones wait for data that arrives after theirs.
        ASSERT_GE(needed, latest);
        latest = needed;
      }
      ASSERT_TRUE(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
    }
  });
}

TEST(RsTiles, OnceEachAndChunksCompleteBeforeTheyAreSent) {
  for_all_tilings([](int world, int64_t m, int64_t tile_m, int rank) {
    const int64_t tiles = tile_count(m, tile_m);
    std::vector<int64_t> done_at(size_t(tiles), -1);
    for (int64_t position = 0; position < tiles; ++position) {
      const int64_t tile = rs_tile(rank, world, m, tile_m, position);
      ASSERT_EQ(done_at[size_t(tile)], -1);
      done_at[size_t(tile)] = position;
    }
    const Range own = split(m, world, rank);
    int64_t own_tiles = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const Range rows = tile_rows(m, tile_m, tile);
      own_tiles += rows.begin >= own.begin && rows.end() <= own.end();
    }
    for (const int chunks : kChunks) {
      for (int step = 0; step < world; ++step) {
        const int owner = rs_owner(rank, world, step);
        for (int chunk = 0; chunk < chunks; ++chunk) {
          const Range rows = chunk_rows(m, world, owner, chunks, chunk, Taper::rising);
          if (rows.count == 0) continue;
          int64_t last = 0;
          for (int64_t row = rows.begin; row < rows.end(); ++row) {
            last = std::max(last, done_at[size_t(row / tile_m)]);
          }
          const int64_t ready = rs_ready_after(rank, world, m, tile_m, rows);
          ASSERT_EQ(ready, last + 1);
          // No remote chunk waits for a tile that holds own rows only.
          if (owner != rank) {
            ASSERT_LE(ready, tiles - own_tiles);
          }
        }
      }
    }
  });
}

TEST(ArPanels, CoverEveryRowOnceWithinTheBound) {
  for (int world = 1; world <= 8; ++world) {
    for (const int64_t m : kRows) {
      for (const int panels : kChunks) {
        int64_t next = 0;
        std::vector<int64_t> owned(size_t(world), 0);
        for (int panel = 0; panel < panels; ++panel) {
          for (int owner = 0; owner < world; ++owner) {
            const Range rows = ar_rows(m, world, panels, panel, owner);
            ASSERT_EQ(rows.begin, next);
            ASSERT_EQ(ar_rows_before(m, world, panels, panel, owner), owned[size_t(owner)]);
            owned[size_t(owner)] += rows.count;
            next = rows.end();
          }
        }
        ASSERT_EQ(next, m);
        for (const int64_t rows : owned) ASSERT_LE(rows, ar_rows_bound(m, world, panels));
      }
    }
  }
}

}  // namespace
}  // namespace tandem::schedule
