// Files as users have them: kinds, endings, compression, mixtures in folders and damage, generated.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>

#include "core/system/files.h"
#include "engine/data/sampler.h"
#include "engine/data/scored_windows.h"
#include "engine/data/select_data.h"
#include "engine/data/text/text_windows.h"
#include "packed_fixtures.h"
#include "tandem/error.h"
#include "tandem/world.h"
#include "tests/engine/data/open_configured.h"
#include "tests/error_of.h"
#include "token_fixtures.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using Paths = std::vector<std::string>;
namespace fs = std::filesystem;

constexpr int64_t kVocab = 70000;

/// As two members or frames, cut within the text.
std::string in_two(std::string (*pack)(std::string_view), std::string_view text) {
  return pack(text.substr(0, text.size() / 3)) + pack(text.substr(text.size() / 3));
}

struct Packing {
  const char* ending;
  std::function<std::string(std::string_view)> pack;
};
const std::vector<Packing>& packings() {
  static const std::vector<Packing> all{
      {"", [](std::string_view text) { return std::string(text); }},
      {".gz", gzip},
      {".GZ", [](std::string_view text) { return in_two(gzip, text); }},
      {".gz", [](std::string_view text) { return gzip(text) + std::string(512, '\0'); }},
      {".zst", zstd},
      {".ZST", [](std::string_view text) { return in_two(zstd, text); }},
      {".zstd",
       [](std::string_view text) {
         return std::string("\x50\x2a\x4d\x18\4\0\0\0skip", 12) + zstd(text);
       }},
  };
  return all;
}

std::string make_lines(const std::string& key, int seed) {
  std::string lines;
  for (int i = 0; i < 30; ++i) {
    std::string escaped;
    for (const char c : make_text(seed + i, 20)) escaped += c == '\n' ? "\\n" : std::string(1, c);
    lines += fmt::format("{{\"n\": {}, \"{}\": \"{}\"}}\n", i, key, escaped);
  }
  return lines;
}

std::string words_of(std::initializer_list<int32_t> words) {
  std::string bytes(reinterpret_cast<const char*>(words.begin()), words.size() * 4);
  bytes.resize(1024);
  return bytes;
}

/// A data set: files by name, and what they are read as.
struct DataSet {
  std::string name, format;
  std::map<std::string, std::string> files;  ///< "a.txt"
  bool is_packable = false;
  std::string text_key = "text";
};

std::vector<DataSet> data_sets() {
  const std::vector<int32_t> small = random_tokens(3000, 60000, 1),
                             large = random_tokens(3000, 70000, 2);
  const IndexFixture index{.type_code = 8, .item = 2, .lengths = {1000, 2000}, .documents = {0, 1}};
  std::vector<DataSet> sets;
  for (const char* ending : {".txt", ".TXT", ".cc", ".md", ".csv", ""}) {
    sets.push_back({fmt::format("text {}", ending),
                    "text",
                    {{fmt::format("a{}", ending), make_text(1, 900)}},
                    true});
  }
  for (const char* ending :
       {".jsonl", ".JSONL", ".ndjson", ".json", ".Json", "", ".00000-of-00002"}) {
    sets.push_back({fmt::format("lines {}", ending),
                    "jsonl",
                    {{fmt::format("a{}", ending), make_lines("text", 1)}},
                    true});
    sets.push_back({fmt::format("other key {}", ending),
                    "jsonl",
                    {{fmt::format("a{}", ending), make_lines("content", 1)}},
                    true,
                    "content"});
  }
  sets.push_back({"megatron", "tokens", {{"a.bin", tokens_as(small, 2)}, {"a.idx", index.text()}}});
  sets.push_back({"MEGATRON", "tokens", {{"A.BIN", tokens_as(small, 2)}, {"A.IDX", index.text()}}});
  sets.push_back({"npy", "tokens", {{"a.NPY", npy_text("<u4", large, 4)}}});
  sets.push_back({"uint16", "tokens", {{"a.bin", tokens_as(small, 2)}}});
  sets.push_back({"uint32", "tokens", {{"a.bin", tokens_as(large, 4)}}});
  sets.push_back({"uint32 below 2^16", "tokens", {{"a.bin", tokens_as(small, 4)}}});
  sets.push_back({"int64", "tokens", {{"a.bin", tokens_as(large, 8)}}});
  sets.push_back(
      {"llm.c", "tokens", {{"a.bin", words_of({20240520, 1, 3000}) + tokens_as(small, 2)}}});
  sets.push_back(
      {"llm.c 2", "tokens", {{"a.bin", words_of({20240801, 1, 3000}) + tokens_as(large, 4)}}});
  return sets;
}

/// Files beside data that are left out of every format.
const std::map<std::string, std::string>& strangers() {
  using namespace std::string_literals;
  static const std::map<std::string, std::string> all{
      {"_SUCCESS", ""},
      {".gitattributes", "* text=auto\n"},
      {".git/config", "[core]\n"},
      {".DS_Store", "\0\0\0\1Bud1"s},
      {"._a.jsonl", "\0\5\x16\7"s},
      {"out/run_id", "0123"},
      {"out/ledger.jsonl", "{\"step\": 1}\n"},
      {"picture.png", "\x89PNG\r\n\x1a\n\0\0\0"s},
      {"icon", "\0\0\1\0"s},
  };
  return all;
}

/// Left out of token files and JSON Lines; text beside text.
const std::map<std::string, std::string>& companions() {
  static const std::map<std::string, std::string> all{
      {"README.md", "# The data\n"},
      {"LICENSE", "CC0\n"},
      {"meta.json", "{}\n"},
      {"dataset_info.json", "{\n \"n\": 3\n}\n"},
      {"prepare.py", "print(1)\n"},
      {"SHA256SUMS", "00 a\n"},
      {"tokenizer.json", "{\"a\": 1}"},
      {"job.yaml", "a: 1\n"},
  };
  return all;
}

void write(const std::string& path, const std::string& content) {
  fs::create_directories(fs::path(path).parent_path());
  write_bytes(path, content);
}

TrainConfig config_of(const Paths& paths, const std::string& text_key = "text",
                      int64_t vocab = 257) {
  TrainConfig config;
  config.model.vocab = vocab;
  config.data.paths = paths;
  config.data.text_key = text_key;
  return config;
}

std::vector<int32_t> read_all(const TokenSource& source) {
  std::vector<int32_t> tokens(static_cast<size_t>(source.tokens()));
  source.read(0, tokens);
  return tokens;
}

std::string refusal_of(const Paths& paths, const std::string& format = "auto") {
  TrainConfig config = config_of(paths);
  config.data.format = format;
  return error_of([&] { open_configured(config); });
}

/// Text and JSON Lines are bytes.
int64_t vocab_of(const DataSet& set) {
  return set.format == "text" || set.format == "jsonl" ? 257 : kVocab;
}

/// The tokens of the set, from uncompressed files without others beside them, in the known format.
std::vector<int32_t> expected_tokens(const DataSet& set, const TempDir& dir,
                                     const std::string& folder) {
  for (const auto& [name, content] : set.files) write(dir / (folder + "/" + name), content);
  TrainConfig config = config_of({dir / (folder + "/*")}, set.text_key, vocab_of(set));
  config.data.format = set.format;
  return read_all(*open_configured(config));
}

TEST(DataKinds, EveryKindHasTheTokensOfItsFilesWhereverTheyStand) {
  int cases = 0;
  for (const DataSet& set : data_sets()) {
    const TempDir dir;
    const std::vector<int32_t> expected = expected_tokens(set, dir, "stored");
    if (set.name.starts_with("llm.c") || set.name.starts_with("uint") || set.name == "int64") {
      EXPECT_EQ(expected.size(), 3000u) << set.name;
    }
    for (size_t i = 0; i < (set.is_packable ? packings().size() : 1); ++i) {
      const Packing& packing = packings()[i];
      for (const char* below : {"", "nested/deep/"}) {
        for (const bool has_strangers : {false, true}) {
          const std::string folder =
              dir / fmt::format("{}{}{}", i, below[0] ? "n" : "f", has_strangers);
          Paths named;
          for (const auto& [name, content] : set.files) {
            named.push_back(fmt::format("{}/{}{}{}", folder, below, name, packing.ending));
            write(named.back(), packing.pack(content));
          }
          if (has_strangers) {
            for (const auto& [name, content] : strangers()) write(folder + "/" + name, content);
            for (const auto& [name, content] : companions()) {
              if (set.format != "text") write(folder + "/" + below + name, content);
            }
          }
          std::vector<Paths> named_as{{folder}, named};
          if (!has_strangers) named_as.push_back({folder + "/" + below + "*"});
          for (const Paths& paths : named_as) {
            SCOPED_TRACE(set.name + ": " + paths[0]);
            const auto source = open_configured(config_of(paths, set.text_key, vocab_of(set)));
            EXPECT_EQ(source->format(), set.format);
            EXPECT_EQ(read_all(*source), expected);
            const bool says = paths[0] == folder && has_strangers;
            EXPECT_GE(source->notes().size(), says ? 3u : 0u);
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_GT(cases, 500);
  RecordProperty("cases", cases);
}

struct Refused {
  const char* name;
  std::string content;
  const char* says;
};

std::vector<Refused> refused_files() {
  using namespace std::string_literals;
  const std::string noise("\0\1\2\3\xff\xfe", 6);
  return {
      {"a.parquet", "PAR1" + noise + "PAR1", "pyarrow.parquet"},
      {"a.bin.parquet", "PAR1" + noise, "pyarrow.parquet"},
      {"data", "PAR1" + noise, "pyarrow.parquet"},
      {"a.feather", "ARROW1" + noise, "ipc.open_file"},
      {"data-00000-of-00001.arrow", "\xff\xff\xff\xff" + noise, "ipc.open_stream"},
      {"a.orc", "ORC" + noise, "JSON Lines"},
      {"a.avro", "Obj\1" + noise, "JSON Lines"},
      {"a.h5", "\x89HDF\r\n" + noise, "HDF5"},
      {"a.tfrecord", noise, "TFRecords"},
      {"a.npz", "PK\3\4" + noise, "numpy.save"},
      {"a.pkl", "\x80\4" + noise, "pickle"},
      {"a.zip", "PK\3\4" + noise, "unzip"},
      {"a.tar", std::string(257, 'a') + "ustar" + noise, "tar -xf"},
      {"a.tar.gz", gzip(std::string(257, 'a') + "ustar" + noise), "tar -xf"},
      {"a.jsonl.bz2", "BZh91AY&SY" + noise, "bzip2 -dk"},
      {"a.jsonl.xz", "\xfd"s + "7zXZ\0"s + noise, "xz -dk"},
      {"a.txt.lz4", "\x04\x22\x4d\x18" + noise, "lz4 -dk"},
      {"a.7z", "7z\xbc\xaf\x27\x1c" + noise, "7z x"},
      {"a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
       "git lfs pull"},
      {"a.bin", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
       "git lfs pull"},
      {"a.jsonl.gz", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
       "git lfs pull"},
      {"a.txt", "\xff\xfeh\0i\0"s, "iconv -f UTF-16"},
      {"a.json", "[{\"text\": \"one\"},\n {\"text\": \"two\"}]\n", "json.load"},
      {"a.jsonl.gz", "{\"text\": \"not compressed\"}\n", "give it the ending"},
      {"a.txt.zst", "text", "give it the ending"},
      {"a.bin.gz", gzip(noise + noise), "gunzip -k"},
      {"a.npy.zst", zstd(noise + noise), "zstd -dk"},
      {"a.jsonl.gz.zst", zstd(gzip("{\"text\": \"a\"}\n")), "zstd -dk"},
      {"a.parquet.gz", gzip("PAR1" + noise), "pyarrow"},
  };
}

TEST(DataKinds, OtherFormatsAreRefusedWithTheCommandThatHelps) {
  for (const Refused& file : refused_files()) {
    for (const char* below : {"", "x/", "README.md+"}) {
      const TempDir dir;
      const std::string in = below == std::string("x/") ? "x/" : "";
      write(dir / (in + file.name), file.content);
      if (below == std::string("README.md+")) write(dir / "README.md", "# data\n");
      for (const std::string& path : {dir.path(), dir / (in + file.name), dir / (in + "a*")}) {
        if (path.ends_with('*') && !std::string(file.name).starts_with('a')) continue;
        const std::string error = refusal_of({path});
        EXPECT_THAT(error, HasSubstr(file.name)) << path;
        EXPECT_THAT(error, HasSubstr(file.says)) << path;
        EXPECT_EQ(error.find('\n'), error.npos) << error;
      }
    }
  }
}

TEST(DataKinds, BinaryFilesAreRefusedWhereNamedAndLeftOutOfFolders) {
  using namespace std::string_literals;
  for (const auto& [name, content] : {std::pair{"a.png", "\x89PNG\r\n\0"s},
                                      {"a.jpg", "\xff\xd8\xff\0"s},
                                      {"a.pdf", "%PDF-1.4\n"s},
                                      {"a.bin",
                                       "\x7f"
                                       "ELF\2\1"s},
                                      {"a.txt", "one\0two"s},
                                      {"a", "\0"s},
                                      {"model.safetensors", "{}"s}}) {
    const TempDir dir;
    write(dir / name, content);
    EXPECT_THAT(refusal_of({dir / name}), HasSubstr(name));
    EXPECT_THAT(refusal_of({dir.path()}), HasSubstr("none of text")) << name;
    write(dir / "b.txt", "text");
    const auto source = open_configured(config_of({dir.path()}));
    EXPECT_EQ(source->tokens(), 5) << name;
    EXPECT_THAT(source->notes(), ::testing::Contains(HasSubstr(name)));
    if (name == std::string("a.bin")) continue;
    TrainConfig bytes = config_of({dir / name});
    bytes.data.format = "text";
    EXPECT_EQ(open_configured(bytes)->tokens(), 1 + int64_t(content.size())) << name;
  }
}

TEST(DataKinds, SeveralFormatsInAFolderAreRefusedUntilOneIsChosen) {
  const std::map<std::string, std::pair<std::string, std::string>> files{
      {"text", {"a.txt", "some text"}},
      {"jsonl", {"b.jsonl", "{\"text\": \"a document\"}\n"}},
      {"tokens", {"c.bin", tokens_as(random_tokens(100, 60000, 3), 2)}},
  };
  for (const auto& [first, of_first] : files) {
    for (const auto& [second, of_second] : files) {
      if (first >= second) continue;
      const TempDir dir;
      write(dir / of_first.first, of_first.second);
      write(dir / of_second.first, of_second.second);
      write(dir / "README.md", "# both\n");
      EXPECT_THAT(refusal_of({dir.path()}), HasSubstr("expected one format")) << first << second;
      EXPECT_THAT(refusal_of({dir / "*"}), HasSubstr("expected one format")) << first << second;
      for (const std::string& format : {first, second}) {
        TrainConfig config = config_of({dir.path()}, "text", format == "tokens" ? kVocab : 257);
        config.data.format = format;
        const std::string& name = files.at(format).first;
        const SelectedData selected = select_data({dir.path()}, format, "text");
        EXPECT_THAT(selected.files, ::testing::Contains(dir / name)) << first << second;
        EXPECT_EQ(open_configured(config)->format(), format);
      }
      write(dir / "d.parquet", "PAR1");
      EXPECT_THAT(refusal_of({dir.path()}), HasSubstr("expected one format"));
    }
  }
}

TEST(DataKinds, CompressedTextSplitsShufflesAndStreamsAsItsFilesUnpacked) {
  const TempDir dir;
  for (const bool is_lines : {false, true}) {
    for (const char* packed : {".gz", ".zst"}) {
      const std::string a = dir / fmt::format("stored{}{}", packed, is_lines);
      const std::string b = dir / fmt::format("packed{}{}", packed, is_lines);
      for (int i = 0; i < 6; ++i) {
        const std::string text =
            is_lines ? make_lines("text", 31 * i) : make_text(i, i == 3 ? 150'000 : 3000);
        const std::string name = fmt::format("/{}.{}", i, is_lines ? "jsonl" : "txt");
        write(a + name, text);
        write(b + name + packed, packed == std::string(".gz") ? gzip(text) : zstd(text));
      }
      for (const char* order : {"shuffle", "stream"}) {
        for (const char* separator : {"", ";\n"}) {
          TrainConfig config = config_of({a});
          config.train.seq = 64;
          config.data.order = order;
          config.data.shuffle_windows = 8;
          if (!is_lines) config.data.document_separator = separator;
          if (order == std::string("shuffle")) config.data.val_fraction = 0.3;
          const auto stored = open_configured(config);
          config.data.paths = {b};
          const auto unpacked = open_configured(config);
          SCOPED_TRACE(fmt::format("{} {} {}", b, order, separator));
          EXPECT_EQ(unpacked->tokens(), stored->tokens());
          if (order == std::string("shuffle")) {
            EXPECT_EQ(unpacked->fingerprint(), stored->fingerprint());
            EXPECT_EQ(unpacked->held_out().identity, stored->held_out().identity);
          }
          const Sampler from(*stored, 64, 5), to(*unpacked, 64, 5);
          std::vector<int32_t> tokens(64), targets(64), other_tokens(64), other_targets(64);
          for (int64_t sample = 0; sample < 200; ++sample) {
            from.read(sample, tokens, targets);
            to.read(sample, other_tokens, other_targets);
            ASSERT_EQ(other_tokens, tokens) << sample;
            ASSERT_EQ(other_targets, targets) << sample;
          }
          const HeldOut& set = unpacked->held_out();
          if (set.files.empty()) continue;
          const HeldOut& expected = stored->held_out();
          const TextWindows windows(set.files, set.sizes, 64, 32, 0, set.contents);
          const TextWindows stored_windows(expected.files, expected.sizes, 64, 32, 0);
          ASSERT_EQ(windows.count(), stored_windows.count());
          for (int64_t i = 0; i < windows.count(); i += 7) {
            EXPECT_EQ(windows.read(i).targets, stored_windows.read(i).targets);
          }
        }
      }
    }
  }
}

TEST(DataKinds, RanksUnpackEachFileOnceAndSeeTheSame) {
  const TempDir dir;
  for (int i = 0; i < 7; ++i) {
    write(dir / fmt::format("{}.jsonl.gz", i), gzip(make_lines("text", i)));
    write(dir / fmt::format("{}.jsonl.zst", i), zstd(make_lines("text", 50 + i)));
  }
  const std::vector<int32_t> expected = read_all(*open_configured(config_of({dir.path()})));
  run_threads({.ranks = 3}, [&](Communicator& comm) {
    EXPECT_EQ(read_all(*open_configured(config_of({dir.path()}), &comm)), expected);
  });
  std::string damaged = gzip(make_lines("text", 99));
  damaged.resize(damaged.size() - 9);
  write(dir / "8.jsonl.gz", damaged);
  run_threads({.ranks = 3}, [&](Communicator& comm) {
    EXPECT_THAT(error_of([&] { open_configured(config_of({dir.path()}), &comm); }),
                HasSubstr("8.jsonl.gz: damaged gzip file: byte "));
  });
}

TEST(DataKinds, TextsUnderAnotherKeyAreNamed) {
  const TempDir dir;
  write(dir / "a.jsonl", "{\"content\": \"x\", \"id\": 3}\n");
  EXPECT_THAT(refusal_of({dir.path()}),
              HasSubstr("a.jsonl:1: {\"content\": \"x\", \"id\": 3}: expected {\"text\": \"...\"} "
                        "(texts under content: data.text_key)"));
}

}  // namespace
}  // namespace tandem
