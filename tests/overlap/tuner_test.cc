#include "tune/tuner.h"

#include <array>
#include <chrono>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/system/env.h"
#include "core/system/files.h"
#include "core/system/machine.h"
#include "core/version.h"
#include "gemm/gemm.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"
#include "tests/overlap/problem.h"
#include "tune/measure.h"

namespace tandem::test {
namespace {

class Tuner : public OnRanks {};

const std::vector<std::string> kNames{"serial", "overlapped", "overlapped twice"};

/// Reports fixed times per candidate, with one of them slow on `slow_rank`.
auto times(int rank, std::vector<int> milliseconds, int slow_rank = -1) {
  return [=](size_t at) {
    const int extra = rank == slow_rank && at == 2 ? 30 : 0;
    return (milliseconds[at] + extra) * 1e-3;
  };
}

TEST_P(Tuner, TimesBeginWhenAllRanksAreReadyAndEndWithTheCall) {
  run([](Communicator& comm) {
    const auto sleep = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
    const TimedRun nap = timed(comm, [&] { sleep(5); });
    EXPECT_GE(nap(), 0.005);
    const std::vector<TimedRun> variants{nap, [] { return 2.0; }};
    const auto samples = measure(comm, std::span(variants), {.min_rounds = 2, .seconds = 0});
    ASSERT_EQ(samples.size(), 2u);
    ASSERT_EQ(samples[0].size(), 2u);
    for (const double seconds : samples[0]) EXPECT_GE(seconds, 0.005);
    EXPECT_EQ(samples[1], std::vector<double>(2, 2.0));
  });
}

TEST_P(Tuner, ChoosesByTheSlowestRank) {
  run([](Communicator& comm) {
    forget_tuned();
    EXPECT_EQ(tune(comm, "test", "fastest", kNames, times(comm.rank(), {12, 8, 2})), 2u);
    // Fast on all ranks except a slow one.
    const int slow = comm.size() - 1;
    EXPECT_EQ(tune(comm, "test", "slow rank", kNames, times(comm.rank(), {12, 6, 2}, slow)), 1u);
  });
}

TEST_P(Tuner, SerialWinsIfNothingIsFaster) {
  run([](Communicator& comm) {
    EXPECT_EQ(tune(comm, "test", "serial", kNames, times(comm.rank(), {2, 8, 9})), 0u);
  });
}

TEST_P(Tuner, GainsBelowTheMarginAreIgnored) {
  run([](Communicator& comm) {
    const std::vector<std::string> names{"a", "b", "c"};
    int key = 0;
    const auto chosen = [&](const std::vector<double>& us, Margin margin) {
      const auto measure = [&] { return us; };
      return choose(comm, "margin " + std::to_string(key++), names, measure, margin);
    };
    EXPECT_EQ(chosen({100, 99, 98.5}, {0.02, 0}), 0u);
    EXPECT_EQ(chosen({100, 97, 96.9}, {0.02, 0}), 2u);
    EXPECT_EQ(chosen({100, 97, 96.9}, {0.02, 0.01}), 1u);
    EXPECT_EQ(chosen({100, 97, 90}, {0.02, 0.01}), 2u);
  });
}

TEST_P(Tuner, ReadsTheFileOnceUntilItChanges) {
  if (mpi_world()) GTEST_SKIP() << "threads only: memory is cleared from outside";
  if (ranks() != 2) GTEST_SKIP() << "the file is rank 0's: two ranks show everything";
  const std::string path = env().cache_dir + "/tuner.json";
  const auto tune_each = [&](const std::vector<std::string>& shapes) {
    const uint64_t before = file_bytes_moved();
    run([&](Communicator& comm) {
      for (const std::string& shape : shapes) {
        EXPECT_EQ(tune(comm, "test", shape, kNames, times(comm.rank(), {9, 8, 1})), 2u);
      }
    });
    return file_bytes_moved() - before;
  };
  const std::vector<std::string> shapes{"read 1", "read 2", "read 3"};
  tune_each(shapes);  // known from now on
  forget_tuned();
  tune_each({shapes[0]});  // reads times that ship with the library, too, in the first test
  forget_tuned();
  const uint64_t once = tune_each({shapes[0]});
  EXPECT_EQ(once, std::filesystem::file_size(path));
  EXPECT_EQ(tune_each({shapes[1]}), 0u);
  const std::string text = read_file(path);
  replace_file(path, text);  // as another process does
  EXPECT_EQ(tune_each({shapes[2]}), once);
}

TEST_P(Tuner, KeepsItsChoiceInAFileAndIgnoresADamagedOne) {
  if (mpi_world()) GTEST_SKIP() << "threads only: memory is cleared from outside";
  if (ranks() != 2) GTEST_SKIP() << "the file is rank 0's: two ranks show everything";
  const std::string path = env().cache_dir + "/tuner.json";
  const auto never = [](size_t) {
    ADD_FAILURE() << "measured again";
    return 0.0;
  };
  run([](Communicator& comm) {
    tune(comm, "test", "kept", kNames, times(comm.rank(), {9, 8, 1}));
  });
  forget_tuned();
  run([&](Communicator& comm) { EXPECT_EQ(tune(comm, "test", "kept", kNames, never), 2u); });
  const auto json = nlohmann::json::parse(std::ifstream(path));
  EXPECT_TRUE(json.is_object());
  for (const char* damage : {"", "{\"", "[1, 2]", "7"}) {
    std::ofstream(path) << damage;
    forget_tuned();
    run([&](Communicator& comm) {
      EXPECT_EQ(tune(comm, "test", "kept", kNames, times(comm.rank(), {9, 8, 1})), 2u);
    });
    EXPECT_TRUE(nlohmann::json::parse(std::ifstream(path)).is_object());
  }
  // One damaged entry among valid ones.
  auto all = nlohmann::json::parse(std::ifstream(path));
  for (auto& [key, entry] : all.items()) {
    if (entry.is_object()) entry = {{"measured_us", 1}};
  }
  std::ofstream(path) << all;
  forget_tuned();
  run([&](Communicator& comm) {
    EXPECT_EQ(tune(comm, "test", "kept", kNames, times(comm.rank(), {9, 8, 1})), 2u);
  });
  // Kernels of another version have other times.
  all = nlohmann::json::parse(std::ifstream(path));
  for (const nlohmann::json& version : {nlohmann::json("0.0.1"), nlohmann::json()}) {
    all["tandem"] = version;
    std::ofstream(path) << all;
    forget_tuned();
    run([&](Communicator& comm) {
      EXPECT_EQ(tune(comm, "test", "kept", kNames, times(comm.rank(), {9, 1, 8})), 1u);
    });
  }
  forget_tuned();
  run([&](Communicator& comm) { EXPECT_EQ(tune(comm, "test", "kept", kNames, never), 1u); });
  std::filesystem::remove(path);
}

/// Rank 0's file, empty at first.
class ScopedTunerFile {
 public:
  ScopedTunerFile() : path_(env().cache_dir + "/tuner.json") {
    std::filesystem::remove(path_);
    forget_tuned();
  }
  ~ScopedTunerFile() {
    std::filesystem::remove(path_);
    forget_tuned();
  }
  ScopedTunerFile(const ScopedTunerFile&) = delete;
  ScopedTunerFile& operator=(const ScopedTunerFile&) = delete;

  /// Entries by key.
  nlohmann::json entries() const {
    nlohmann::json all = nlohmann::json::object();
    if (std::ifstream file(path_); file) file >> all;
    all.erase("tandem");
    return all;
  }
  /// Applies `change` to every entry and its key.
  void change(const std::function<void(std::string&, nlohmann::json&)>& change) const {
    auto all = nlohmann::json::parse(std::ifstream(path_));
    auto changed = nlohmann::json::object();
    for (auto entry = all.begin(); entry != all.end(); ++entry) {
      std::string name = entry.key();
      nlohmann::json& value = *entry;
      if (value.is_object()) change(name, value);
      changed[name] = value;
    }
    std::ofstream(path_) << changed;
    forget_tuned();
  }

 private:
  std::string path_;
};

/// Milliseconds of each candidate in turn: the first of them in odd rounds, the second in even
/// ones.
auto noisy_times(std::vector<std::array<int, 2>> milliseconds, int* measured) {
  return [=, rounds = std::vector<int>(milliseconds.size())](size_t at) mutable {
    if (at == 0) ++*measured;
    return milliseconds[at][size_t(rounds[at]++ % 2)] * 1e-3;
  };
}

TEST_P(Tuner, DoubtfulChoiceAgainstSerialIsNotStored) {
  if (mpi_world() || ranks() != 2) GTEST_SKIP() << "memory is cleared from outside; two ranks do";
  const ScopedTunerFile file;
  const std::vector<std::string> two{"serial", "overlapped"};
  const auto chosen = [&](const char* shape, std::vector<std::array<int, 2>> milliseconds,
                          Bits bits = Bits::same) {
    size_t best = 0;
    std::array<int, 2> measured{};
    for (int start = 0; start < 2; ++start) {
      forget_tuned();
      int count[2] = {};
      run([&](Communicator& comm) {
        const auto seconds = noisy_times(milliseconds, &count[comm.rank()]);
        const size_t choice = tune(comm, "test", shape, two, seconds, bits);
        if (comm.rank() == 0) best = choice;
      });
      measured[size_t(start)] = count[0] > 0;
    }
    return std::pair(best, measured[0] + measured[1]);
  };
  // A tenth faster, in rounds that differ by half: chosen, and measured again at the next start.
  EXPECT_EQ(chosen("doubt", {{10, 15}, {9, 13}}), std::pair(size_t(1), 2));
  EXPECT_TRUE(file.entries().empty());
  // Faster by more than rounds differ, or serial whatever the rounds: stored.
  EXPECT_EQ(chosen("clear", {{10, 11}, {4, 5}}), std::pair(size_t(1), 1));
  EXPECT_EQ(chosen("serial", {{15, 10}, {14, 11}}), std::pair(size_t(0), 1));
  // Results whose bits depend on the choice keep it.
  EXPECT_EQ(chosen("bits", {{10, 15}, {9, 13}}, Bits::by_candidate), std::pair(size_t(1), 1));
  const nlohmann::json entries = file.entries();
  EXPECT_EQ(entries.size(), 3u);
  for (const auto& [key, entry] : entries.items()) {
    EXPECT_GT(entry.at("time").get<double>(), 1.7e9) << key;
    EXPECT_GE(entry.at("load").get<double>(), 0) << key;
    EXPECT_GT(entry.at("spread").get<double>(), 0) << key;
  }
}

TEST_P(Tuner, OldAndDoubtfulTimesAreMeasuredAgain) {
  if (mpi_world() || ranks() != 2) GTEST_SKIP() << "memory is cleared from outside; two ranks do";
  const ScopedTunerFile file;
  const double now = double(std::time(nullptr)), hours = 3600, days = 24 * hours;
  const auto again = [&](double age, double load, double spread, Bits bits = Bits::same) {
    file.change([&](std::string&, nlohmann::json& entry) {
      entry["time"] = now - age, entry["load"] = load, entry["spread"] = spread;
    });
    bool measured[2] = {};
    run([&](Communicator& comm) {
      tune(
          comm, "test", "age", kNames,
          [&](size_t at) {
            measured[comm.rank()] = true;
            return times(comm.rank(), {9, 8, 1})(at);
          },
          bits);
    });
    EXPECT_EQ(measured[0], measured[1]);
    return measured[0];
  };
  run([](Communicator& comm) { tune(comm, "test", "age", kNames, times(comm.rank(), {9, 8, 1})); });
  EXPECT_FALSE(again(2 * hours, 0.5, 0.1));
  EXPECT_FALSE(again(29 * days, 0.5, 0.1));
  EXPECT_TRUE(again(31 * days, 0.5, 0.1));
  EXPECT_FALSE(again(0.5 * hours, 3, 0.1));
  EXPECT_TRUE(again(2 * hours, 3, 0.1));
  EXPECT_TRUE(again(2 * hours, 0.5, 0.95));  // more than the gain: 1 of 9
  EXPECT_TRUE(again(-2 * days, 0.5, 0.1));   // a clock that was wrong
  EXPECT_FALSE(again(31 * days, 3, 0.95, Bits::by_candidate));
}

TEST_P(Tuner, TimesOfAnotherMachineOrBuildAreIgnored) {
  if (mpi_world() || ranks() != 2) GTEST_SKIP() << "memory is cleared from outside; two ranks do";
  const ScopedTunerFile file;
  const auto measures = [&] {
    bool measured[2] = {};
    run([&](Communicator& comm) {
      tune(comm, "test", "machine", kNames, [&](size_t at) {
        measured[comm.rank()] = true;
        return times(comm.rank(), {9, 8, 1})(at);
      });
    });
    return measured[0];
  };
  EXPECT_TRUE(measures());
  const Machine machine = this_machine();
  std::vector<std::string> fields{machine.cpu, std::to_string(machine.threads) + " cores",
                                  "oneDNN ",   kCommit,
                                  kBuildType,  kCompiler};
  for (const std::string& feature : machine.features) fields.push_back(feature);
  for (const std::string& field : fields) {
    forget_tuned();
    EXPECT_FALSE(measures()) << field;
    file.change([&](std::string& key, nlohmann::json&) {
      ASSERT_TRUE(key.find(field) != key.npos) << field << " in " << key;
      key.replace(key.find(field), field.size(), "other");
    });
    EXPECT_TRUE(measures()) << field;
    std::filesystem::remove(env().cache_dir + "/tuner.json");
    forget_tuned();
    EXPECT_TRUE(measures()) << field;
  }
}

TEST_P(Tuner, DifferentCandidatesAreAMismatchOnEveryRank) {
  if (ranks() == 1) GTEST_SKIP() << "one rank always agrees";
  run([](Communicator& comm) {
    const bool last = comm.rank() + 1 == comm.size();
    const auto measure = [&]() -> std::vector<double> {
      ADD_FAILURE() << "measured";
      return {1, 2, 3};
    };
    const std::vector<std::string> three{"serial", "chunked", "fused"}, two{"serial", "fused"},
        one{"serial"};
    const auto message = [&](const std::vector<std::string>& others) -> std::string {
      try {
        choose(comm, "mismatch", last ? others : three, measure);
      } catch (const Mismatch& error) {
        return error.what();
      }
      return "";
    };
    const auto rank = std::to_string(comm.size() - 1);
    EXPECT_EQ(message(two), "tuner candidates: rank 0 has chunked, rank " + rank +
                                " has fused: expected the same on all ranks");
    EXPECT_EQ(message(one), "tuner candidates: rank 0 has chunked, rank " + rank +
                                " has no more: expected the same on all ranks");
  });
}

TEST_P(Tuner, AutomaticOperatorsAgreeOnAChoiceAndKeepTheBits) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const uint64_t rank = uint64_t(comm.rank());
    const Shard local = shard_of(96, comm.size(), comm.rank());
    const Matrix x(DType::f32, 96, 24, 1 + rank), w(DType::f32, 40, 24, 9 + rank);
    if (rank == 0) forget_tuned(), std::filesystem::remove(env().cache_dir + "/tuner.json");
    std::vector<std::byte> bits[2][3];
    std::vector<int> choice;
    for (const Strategy strategy : {Strategy::serial, Strategy::automatic}) {
      const Matrix ag_out(DType::f32, 96, 40, 0), rs_out(DType::f32, local.count, 40, 0);
      const Matrix ar_out(DType::f32, 96, 40, 0);
      AgGemm ag(comm, {96, 40, 24}, {strategy, 0});
      GemmRs rs(comm, {96, 40, 24}, {strategy, 0});
      GemmAr ar(comm, {96, 40, 24}, {strategy, 0});
      ag.run(x.tensor().rows(local.begin, local.count), w.tensor(), ag_out.tensor());
      rs.run(x.tensor(), w.tensor(), rs_out.tensor());
      ar.run(x.tensor(), w.tensor(), ar_out.tensor());
      auto& of = bits[strategy == Strategy::automatic];
      of[0] = bytes_of(ag_out.tensor());
      of[1] = bytes_of(rs_out.tensor());
      of[2] = bytes_of(ar_out.tensor());
      choice = {int(ag.strategy()), int(rs.strategy()), int(ar.strategy())};
    }
    for (size_t i = 0; rows_keep_bits() && i < 3; ++i) EXPECT_EQ(bits[0][i], bits[1][i]) << i;
    const auto local_choice = std::as_bytes(std::span(choice));
    for (const auto& other : comm.exchange(local_choice, "choice")) {
      EXPECT_TRUE(std::equal(local_choice.begin(), local_choice.end(), other.begin(), other.end()));
    }
  });
}

TANDEM_INSTANTIATE(Tuner);

}  // namespace
}  // namespace tandem::test
