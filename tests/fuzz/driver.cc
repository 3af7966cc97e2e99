// Replaces libFuzzer for compilers without it: TARGET CORPUS SECONDS [SEED]. Runs the corpus, then
// seeded random mutations of it. An input that ends the process is written to crash-SEED in the
// working directory.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tandem/random.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

std::string current;
std::string crash_file;

void save_current() {
  const int fd = ::open(crash_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd < 0) return;
  const ssize_t written = ::write(fd, current.data(), current.size());
  (void)written;
  ::close(fd);
}

void on_signal(int signal) {
  save_current();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : seed_(seed) {}

  std::string operator()(const std::vector<std::string>& corpus) {
    std::string text = corpus[below(corpus.size())];
    for (uint32_t n = 1 + below(6); n > 0; --n) change(text, corpus);
    if (text.size() > 4096) text.resize(4096);
    return text;
  }

 private:
  uint32_t below(size_t bound) {
    return bound ? tandem::philox(seed_, 0, counter_++)[0] % uint32_t(bound) : 0;
  }

  void change(std::string& text, const std::vector<std::string>& corpus) {
    static const std::string kWords[] = {"0",
                                         "-1",
                                         "18446744073709551616",
                                         "9223372036854775807",
                                         "1e309",
                                         "nan",
                                         "inf",
                                         "true",
                                         "null",
                                         "\"\"",
                                         "[]",
                                         "{}",
                                         "=",
                                         "\n",
                                         ".",
                                         ",",
                                         "[[",
                                         "'''",
                                         "\\u0000",
                                         "\xff\xfe",
                                         "[a.b]",
                                         "#",
                                         ":",
                                         "-0"};
    const uint32_t at = below(text.size() + 1);
    const size_t left = text.size() - at;
    switch (below(7)) {
      case 0:
        if (left) text[at] = char(text[at] ^ (1 << below(8)));
        break;
      case 1:
        if (left) text[at] = char(below(256));
        break;
      case 2:
        text.erase(at, 1 + below(std::min<size_t>(left, 16)));
        break;
      case 3:
        text.insert(at, kWords[below(std::size(kWords))]);
        break;
      case 4:
        text.insert(at, text.substr(at, 1 + below(32)));
        break;
      case 5: {
        const std::string& other = corpus[below(corpus.size())];
        text = text.substr(0, at) + other.substr(below(other.size() + 1));
        break;
      }
      case 6:
        text.resize(at);
        break;
    }
  }

  uint64_t seed_, counter_ = 0;
};

void run(const std::string& input) {
  current = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(current.data()), current.size());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print(stderr, "usage: {} CORPUS SECONDS [SEED]\n", argv[0]);
    return 2;
  }
  const uint64_t seed = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1;
  crash_file = fmt::format("crash-{}", seed);
  std::vector<std::string> corpus{""};
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(save_current);
  for (const int signal : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL}) {
    std::signal(signal, on_signal);
  }
  for (const std::string& input : corpus) run(input);
  Mutator mutate(seed);
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::duration<double>(std::strtod(argv[2], nullptr));
  uint64_t runs = corpus.size();
  for (; std::chrono::steady_clock::now() < end; ++runs) run(mutate(corpus));
  fmt::print("{} runs, {} inputs in the corpus, seed {}\n", runs, corpus.size(), seed);
}
