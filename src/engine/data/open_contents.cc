#include "engine/data/open_contents.h"

#include <algorithm>
#include <cstring>

#include "comm/processes/shared/shared_memory.h"
#include "core/system/files.h"
#include "core/system/process/file_limit.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/text/text_hashing.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr uint64_t kAtOnce = uint64_t(64) << 20;  // unpacked, between two reports of progress

/// Ranks of this host that have opened the same files, in order.
std::vector<int> sharing_ranks(Communicator& world, std::span<DataFile* const> files) {
  std::string identity = std::to_string(processes::host_identity()) + " ";
  for (const DataFile* file : files) identity += file->identity();
  identity = content_hash(identity);
  std::vector<int> ranks;
  const auto all = world.exchange(std::as_bytes(std::span(identity)), "compressed files");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] == all[size_t(world.rank())]) ranks.push_back(int(rank));
  }
  return ranks;
}

void unpack(const DataFile& file, SharedWork& work) {
  for (uint64_t end = kAtOnce, done = 0;; end += kAtOnce) {
    const uint64_t reached = file.reach(end);
    work.advance(int64_t(reached - done));
    done = reached;
    if (reached < end) return;
  }
}

struct Shared {
  uint64_t file;
  Unpacked::Handle handle;
};

/// Takes what other processes have unpacked, or unpacks it where their files cannot be opened.
void adopt(Communicator& world, std::span<const int> ranks, const std::vector<Shared>& local,
           std::span<DataFile* const> files) {
  const auto all = world.exchange(std::as_bytes(std::span(local)), "unpacked files");
  SharedWork work(&world, "unpacking the data", 0);
  std::string error;
  try {
    for (const int rank : ranks) {
      if (rank == world.rank()) continue;
      const auto& blob = all[size_t(rank)];
      for (size_t at = 0; at < blob.size(); at += sizeof(Shared)) {
        Shared shared;
        std::memcpy(&shared, blob.data() + at, sizeof shared);
        DataFile& file = *files[shared.file];
        try {
          file.adopt(shared.handle);
        } catch (const IoError&) {
          unpack(file, work);
        }
      }
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);  // so no rank closes its files before all have opened them
}

/// Unpacks all files, each on one of the ranks that share them. Collective.
void unpack_all(Communicator* world, std::span<DataFile* const> files) {
  const std::vector<int> ranks = world ? sharing_ranks(*world, files) : std::vector<int>{0};
  const auto me = int(std::ranges::find(ranks, world ? world->rank() : 0) - ranks.begin());
  std::vector<int64_t> sizes;
  for (const DataFile* file : files) sizes.push_back(int64_t(file->stored_bytes()));
  const std::vector<int> reader = deal_files(sizes, int(ranks.size()));
  std::vector<Shared> local;
  std::string error;
  SharedWork work(world, "unpacking the data", 0);
  try {
    for (size_t i = 0; i < files.size(); ++i) {
      if (reader[i] != me) continue;
      unpack(*files[i], work);
      local.push_back({i, files[i]->unpacked()->handle()});
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  if (world) adopt(*world, ranks, local, files);
}

/// `open(path, number)`: the file, or nullptr. Collective.
template <typename Open>
DataFiles open_all(std::span<const std::string> paths, Communicator* world, const Open& open) {
  DataFiles files;
  std::vector<DataFile*> packed;
  std::string error;
  SharedWork work(world, "opening the data", 0);
  try {
    for (size_t i = 0; i < paths.size(); ++i) {
      files.push_back(open(paths[i], i));
      if (files.back() && files.back()->unpacked()) {
        if (packed.empty()) raise_file_limit();  // each has two files open
        packed.push_back(files.back().get());
      }
      work.advance(0);
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  unpack_all(world, packed);
  return files;
}

}  // namespace

DataFiles open_contents(std::span<const std::string> paths, Communicator* world) {
  return open_all(paths, world, [](const std::string& path, size_t number) {
    auto file = std::make_shared<DataFile>(path, number < max_open_files(), Content::unpacked);
    file->sample(nullptr);
    return file;
  });
}

DataFiles open_compressed(std::span<const std::string> paths, Communicator* world) {
  return open_all(paths, world, [](const std::string& path, size_t) {
    auto file = std::make_shared<DataFile>(path, false, Content::unpacked);
    return file->unpacked() ? file : nullptr;
  });
}

}  // namespace tandem
