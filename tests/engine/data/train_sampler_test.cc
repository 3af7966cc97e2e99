#include "engine/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "core/system/files.h"
#include "engine/data/corpus.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/text/text_hashing.h"
#include "engine/model/config.h"
#include "engine/train/round_robin.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Paths = std::vector<std::string>;

void make_files(const TempDir& dir, int count, size_t largest) {
  std::filesystem::create_directories(dir / "sub/deep");
  for (int i = 0; i < count; ++i) {
    std::string text(1 + philox(5, 0, uint64_t(i))[0] % largest, ' ');
    for (size_t j = 0; j < text.size(); ++j) text[j] = char(philox(5, 1 + uint64_t(i), j)[0]);
    write_bytes(dir / ((i % 3   ? "f"
                        : i % 2 ? "sub/f"
                                : "sub/deep/f") +
                       std::to_string(i) + ".txt"),
                text);
  }
}

TEST(Permutation, IsABijectionForEverySize) {
  for (int64_t size : {1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 65, 1000, 4096, 5001}) {
    for (uint64_t epoch : {0, 1}) {
      std::vector<int64_t> seen;
      for (int64_t i = 0; i < size; ++i) seen.push_back(permute(3, epoch, size, i));
      std::sort(seen.begin(), seen.end());
      std::vector<int64_t> all(static_cast<size_t>(size));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(seen, all) << size;
    }
  }
}

TEST(Permutation, DependsOnSeedAndEpochAndMixes) {
  int same_epoch = 0, same_seed = 0, neighbours = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    same_epoch += permute(3, 0, 1000, i) == permute(3, 1, 1000, i);
    same_seed += permute(3, 0, 1000, i) == permute(4, 0, 1000, i);
    neighbours += permute(3, 0, 1000, (i + 1) % 1000) == permute(3, 0, 1000, i) + 1;
  }
  EXPECT_LT(same_epoch, 10);
  EXPECT_LT(same_seed, 10);
  EXPECT_LT(neighbours, 10);
}

TEST(Corpus, FindsFoldersGlobsAndFiles) {
  const TempDir dir;
  make_files(dir, 12, 50);
  write_bytes(dir / "empty.txt", "");
  std::filesystem::create_symlink(dir / "f1.txt", dir / "link.txt");
  EXPECT_EQ(find_files(Paths{dir.path()}).files.size(), 13u);
  EXPECT_EQ(find_files(Paths{dir.path(), dir / "f1.txt", dir / "./f1.txt"}).files.size(), 13u);
  EXPECT_EQ(find_files(Paths{dir / "f*.txt"}).files.size(), 8u);
  EXPECT_EQ(find_files(Paths{dir / "sub*"}).files.size(), 4u);
  EXPECT_EQ(Corpus(Paths{dir.path()}, 0).files().size(), 12u);
  EXPECT_THROW(find_files(Paths{dir / "nothing"}), IoError);
  EXPECT_THROW(find_files(Paths{dir / "*.cc"}), IoError);
}

TEST(Corpus, StreamIsEveryFileAfterABeginToken) {
  const TempDir dir;
  make_files(dir, 9, 40);
  write_bytes(dir / "large", std::string(300 * 1024, 'x'));
  const Corpus corpus(Paths{dir.path()}, 0);
  std::vector<int32_t> expected;
  for (const std::string& file : corpus.files()) {
    expected.push_back(kBos);
    for (const char c : read_file(file)) expected.push_back(uint8_t(c));
  }
  ASSERT_EQ(corpus.tokens(), int64_t(expected.size()));
  expected.insert(expected.end(), 5, -1);
  for (size_t begin : {0, 1, 2, 17, 39, 40, 41, 100, 300 * 1024}) {
    std::vector<int32_t> got(std::min<size_t>(200, expected.size() - begin));
    corpus.read(int64_t(begin), got);
    EXPECT_TRUE(std::equal(got.begin(), got.end(), expected.begin() + long(begin))) << begin;
  }
}

TEST(Corpus, HeldOutSplitFollowsContent) {
  const TempDir dir;
  make_files(dir, 200, 60);
  const Corpus all(Paths{dir.path()}, 0), split(Paths{dir.path()}, 0.3);
  EXPECT_EQ(split.files().size() + split.held_out().files.size(), 200u);
  EXPECT_NEAR(double(split.held_out().files.size()), 60, 25);
  EXPECT_NE(all.fingerprint(), split.fingerprint());
  const std::string copy = dir / "a-copy";
  std::filesystem::copy_file(split.held_out().files[0], copy);
  EXPECT_THAT(Corpus(Paths{dir.path()}, 0.3).held_out().files, ::testing::Contains(copy));
}

TEST(Corpus, ErrorsNameTheCause) {
  const TempDir dir;
  write_bytes(dir / "empty", "");
  try {
    Corpus(Paths{dir.path()}, 0);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("0 bytes left to train on; left out 1 empty file (" +
                                        dir / "empty" + ")"));
  }
}

TEST(Corpus, ReportsExcludedFiles) {
  const TempDir dir;
  make_files(dir, 3, 50);
  write_bytes(dir / "empty", "");
  std::filesystem::create_symlink(dir / "f1.txt", dir / "link-b");
  std::filesystem::create_symlink("nowhere", dir / "link-a");
  EXPECT_THAT(Corpus(Paths{dir.path()}, 0).notes(),
              ::testing::ElementsAre(
                  "left out 1 empty file (" + dir / "empty" + ")",
                  "left out 2 links or special files in folders (" + dir / "link-a" + ", ...)"));
}

std::string refusal(const std::string& path) {
  try {
    find_files(Paths{path});
  } catch (const IoError& error) {
    return error.what();
  }
  return "found";
}

TEST(Corpus, NamesTheKindOfAPath) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("loop", dir / "loop");
  std::filesystem::create_symlink("nowhere", dir / "dangling");
  EXPECT_THAT(refusal(dir / "pipe"), HasSubstr("pipe: expected a file or folder, found a pipe"));
  EXPECT_THAT(refusal(dir / "loop"), HasSubstr("loop: cannot look at it: Too many levels"));
  EXPECT_THAT(refusal(dir / "dangling"), HasSubstr("dangling: a link to nothing"));
  EXPECT_THAT(refusal(dir / "none"), HasSubstr("none: no such file or folder"));
}

TEST(Corpus, PathListsSupportAnyName) {
  const Paths valid{"a", "b c"}, broken{"a\nb", "c"};
  EXPECT_EQ(join_paths(valid), "a\nb c\n");
  EXPECT_EQ(split_paths(join_paths(valid)), valid);
  EXPECT_EQ(split_paths(join_paths(broken)), broken);
  const std::vector<std::string> odd{
      "\xef\xbb\xbf"
      "a",
      "b\r"};
  EXPECT_EQ(split_paths(join_paths(odd)), odd);
  EXPECT_EQ(split_paths("\xef\xbb\xbf"
                        "a\r\nb c\r\n"),
            valid);  // as editors save it
  EXPECT_EQ(split_paths("a\n\nb"), (Paths{"a", "b"}));
  EXPECT_EQ(split_paths(""), Paths{});
}

// Text too large to be kept in memory: read from its file.
class LargeText : public ::testing::Test {
 protected:
  LargeText() { write_bytes(path_, std::string(kBytes, 'x')); }
  std::string read_error(const Corpus& corpus) {
    std::vector<int32_t> tokens(100);
    try {
      corpus.read(kBytes - 50, tokens);
    } catch (const IoError& error) {
      return error.what();
    }
    return "read";
  }
  /// Overwrites in place, as an editor or `cp` may.
  void overwrite(size_t offset, std::string_view text) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(long(offset));
    file << text;
  }
  static constexpr size_t kBytes = 400'000;
  const TempDir dir_;
  const std::string path_ = dir_ / "text";
};

TEST_F(LargeText, TruncationIsNamed) {
  const Corpus corpus(Paths{path_}, 0);
  EXPECT_EQ(read_error(corpus), "read");
  std::filesystem::resize_file(path_, 1000);
  EXPECT_THAT(read_error(corpus), HasSubstr(path_ + ": changed while it is trained on: holds 1000 "
                                                    "bytes: expected the 400000 bytes"));
  EXPECT_THROW(corpus.verify(), IoError);
}

TEST_F(LargeText, OverwritingIsNamedAtAnyOffset) {
  const Corpus corpus(Paths{path_}, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // file times have a granularity
  overwrite(10, "other");
  EXPECT_THAT(read_error(corpus), HasSubstr(path_ + ": changed while it is trained on"));
  EXPECT_THROW(corpus.verify(), IoError);
}

TEST_F(LargeText, SameContentAndReplacedNamesAreAllowed) {
  const Corpus corpus(Paths{path_}, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  overwrite(10, "xxx");
  EXPECT_EQ(read_error(corpus), "read");
  write_bytes(dir_ / "new", "new");
  std::filesystem::rename(dir_ / "new", path_);
  EXPECT_EQ(read_error(corpus), "read");
  corpus.verify();
}

TEST(TextHashing, FilesAreDistributedBySize) {
  EXPECT_EQ(deal_files(std::vector<int64_t>{5, 100, 40, 60, 1}, 2),
            (std::vector<int>{0, 0, 1, 1, 1}));
  EXPECT_EQ(deal_files({}, 3), std::vector<int>());
}

TEST(TextHashing, RanksReadTheSameCorpusAsOneProcess) {
  const TempDir dir;
  make_files(dir, 30, 50);
  for (const char name : {'a', 'b', 'c', 'd', 'e'}) {
    write_bytes(dir / std::string(1, name), std::string(300'000 + size_t(name), name));
  }
  const Corpus one(Paths{dir.path()}, 0.4);
  run_threads({.ranks = 3}, [&](Communicator& comm) {
    const Corpus shared(Paths{dir.path()}, 0.4, &comm);
    EXPECT_EQ(shared.files(), one.files());
    EXPECT_EQ(shared.held_out().files, one.held_out().files);
    EXPECT_EQ(shared.held_out().sizes, one.held_out().sizes);
    EXPECT_EQ(shared.fingerprint(), one.fingerprint());
    EXPECT_EQ(shared.held_out().identity, one.held_out().identity);
    EXPECT_EQ(shared.tokens(), one.tokens());
    shared.verify(&comm);
  });
}

TEST(TextHashing, FileUnreadableOnOneRankIsNamedOnAll) {
  const TempDir dir;
  for (const char name : {'a', 'b'}) {
    write_bytes(dir / std::string(1, name), std::string(300'000, name));
  }
  const Corpus corpus(Paths{dir.path()}, 0);
  std::filesystem::resize_file(dir / "b", 1000);
  run_threads({.ranks = 2}, [&](Communicator& comm) {
    const auto expect_named = [&](const auto& body) {
      try {
        body();
        ADD_FAILURE() << "accepted";
      } catch (const IoError& error) {
        EXPECT_THAT(error.what(), HasSubstr(dir / "b"));
      }
    };
    expect_named([&] { corpus.verify(&comm); });
    comm.barrier();
    if (comm.rank() == 0) std::filesystem::remove(dir / "b");
    comm.barrier();
    expect_named([&] { Corpus(Paths{dir / "a", dir / "b"}, 0, &comm); });
    comm.barrier();  // all have left the call alike
  });
}

TEST(SharedWork, RanksWaitForOneThatIsStillWorking) {
  run_threads({.ranks = 2, .deadline_s = 1}, [](Communicator& comm) {
    SharedWork work(&comm, "reading", 0);
    const auto begin = std::chrono::steady_clock::now();
    while (comm.rank() == 1 &&
           std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(1500)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      work.advance(1);
    }
    work.finish("");
  });
}

TEST(RoundRobin, TwoTrainingsTakeTheirStepsInPairs) {
  RoundRobin round_robin(2, 2);
  std::mutex mutex;
  std::string order;  // sequence of each rank's actions
  std::vector<std::thread> ranks;
  const auto train = [&](int run, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step) {
      round_robin.before_step(run, step);
      const std::lock_guard lock(mutex);
      order += char('a' + run);
    }
  };
  std::atomic<int> ended{0};
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&] {
      train(0, 4);
      if (++ended == 2) round_robin.leave(0);
    });
  }
  round_robin.await_ready(0);
  for (int rank = 0; rank < 2; ++rank) ranks.emplace_back([&] { train(1, 6); });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(order,
            "aabb"
            "bbaa"
            "aabb"
            "bbaa"
            "bb"
            "bb");
}

// Windows that a layout's ranks read at each step, like the training loop.
void run_steps(const Sampler& sampler, int64_t& next, int64_t batch, int dp, int64_t steps,
               std::map<int64_t, int>& seen) {
  for (int64_t step = 0; step < steps; ++step, next += batch) {
    for (int rank = 0; rank < dp; ++rank) {
      for (int64_t i = 0; i < batch / dp; ++i) {
        ++seen[sampler.window(next + rank * (batch / dp) + i)];
      }
    }
  }
}

TEST(Sampler, EveryWindowIsReadOnceAcrossResumesAndLayouts) {
  const TempDir dir;
  make_files(dir, 20, 90);
  const Corpus corpus(Paths{dir.path()}, 0);
  for (int64_t seq : {1, 5, 16}) {
    const Sampler sampler(corpus, seq, 9);
    std::map<int64_t, int> seen;
    int64_t next = 0;
    run_steps(sampler, next, 8, 1, sampler.windows() / 24, seen);
    run_steps(sampler, next, 8, 4, sampler.windows() / 24, seen);
    const int64_t saved = next;  // a run that is lost and resumed
    std::map<int64_t, int> lost = seen;
    run_steps(sampler, next, 4, 2, 3, lost);
    next = saved;
    run_steps(sampler, next, 4, 2, (sampler.windows() - next) / 4, seen);
    run_steps(sampler, next, 1, 1, sampler.windows() - next, seen);
    EXPECT_EQ(next, sampler.windows());
    EXPECT_EQ(int64_t(seen.size()), sampler.windows());
    for (const auto& [window, count] : seen) EXPECT_EQ(count, 1) << window;
  }
}

TEST(Sampler, EpochPredictsEveryTokenButTheFirstOnce) {
  const TempDir dir;
  make_files(dir, 7, 90);
  const Corpus corpus(Paths{dir.path()}, 0);
  for (int64_t seq : {1, 3, 16, 100000}) {
    const Sampler sampler(corpus, seq, 9);
    std::vector<int32_t> tokens(static_cast<size_t>(seq)), targets(static_cast<size_t>(seq));
    std::map<int32_t, int> histogram, expected;
    int64_t total = 0;
    for (int64_t sample = 0; sample < sampler.windows(); ++sample) {
      sampler.read(sample, tokens, targets);
      const int64_t count = sampler.targets(sample);
      EXPECT_EQ(std::count(targets.begin(), targets.end(), -1), seq - count);
      for (size_t i = 0; i + 1 < size_t(count); ++i) EXPECT_EQ(tokens[i + 1], targets[i]);
      for (size_t i = 0; i < tokens.size(); ++i) {
        EXPECT_TRUE(int64_t(i) > count ? tokens[i] == -1 : tokens[i] >= 0 && tokens[i] <= kBos);
      }
      for (size_t i = 0; i < size_t(count); ++i) ++histogram[targets[i]];
      total += count;
    }
    std::vector<int32_t> stream(static_cast<size_t>(corpus.tokens()));
    corpus.read(0, stream);
    for (size_t i = 1; i < stream.size(); ++i) ++expected[stream[i]];
    EXPECT_EQ(total, corpus.tokens() - 1);
    EXPECT_EQ(histogram, expected);
  }
}

}  // namespace
}  // namespace tandem
