#include "engine/data/text/text_hashing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "core/system/files.h"
#include "core/system/machine.h"
#include "engine/data/stream/shared_work.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Ranks that see the same files as this one, in order.
std::vector<int> sharing_ranks(Communicator& world, std::span<const TextFile* const> files) {
  std::string identity = boot_id();
  for (const TextFile* file : files) identity += file->identity();
  identity = content_hash(identity);
  std::vector<int> ranks;
  const auto all = world.exchange(std::as_bytes(std::span(identity)), "files of the text");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[size_t(world.rank())]) ranks.push_back(int(rank));
  }
  return ranks;
}

struct Hashed {
  uint64_t file, hash;
};

}  // namespace

std::vector<int> deal_files(std::span<const int64_t> sizes, int ranks) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<int64_t> load(static_cast<size_t>(ranks));
  std::vector<int> reader(sizes.size());
  for (const size_t file : order) {
    const auto minimum = std::ranges::min_element(load);
    *minimum += sizes[file];
    reader[file] = int(minimum - load.begin());
  }
  return reader;
}

std::vector<uint64_t> hash_files(Communicator* world, std::span<const TextFile* const> files) {
  const std::vector<int> ranks = world ? sharing_ranks(*world, files) : std::vector<int>{0};
  const auto me = int(std::ranges::find(ranks, world ? world->rank() : 0) - ranks.begin());
  std::vector<int64_t> sizes;
  for (const TextFile* file : files) sizes.push_back(int64_t(file->size()));
  const std::vector<int> reader = deal_files(sizes, int(ranks.size()));
  int64_t bytes = 0;
  for (size_t i = 0; i < files.size(); ++i) bytes += reader[i] == me ? sizes[i] : 0;
  SharedWork work(world, "hashing the text", bytes);
  std::vector<Hashed> local;
  std::string error;
  try {
    for (size_t i = 0; i < files.size(); ++i) {
      if (reader[i] != me) continue;
      local.push_back({i, files[i]->hash_now([&](size_t read) { work.advance(int64_t(read)); })});
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  std::vector<uint64_t> hashes(files.size());
  const auto take = [&](std::span<const std::byte> blob) {
    for (size_t at = 0; at < blob.size(); at += sizeof(Hashed)) {
      Hashed hashed;
      std::memcpy(&hashed, blob.data() + at, sizeof hashed);
      hashes[hashed.file] = hashed.hash;
    }
  };
  if (!world) {
    take(std::as_bytes(std::span(local)));
    return hashes;
  }
  const auto all = world->exchange(std::as_bytes(std::span(local)), "hashes of the text");
  for (const int rank : ranks) take(all[size_t(rank)]);
  return hashes;
}

}  // namespace tandem
