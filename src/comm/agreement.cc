#include "comm/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include "core/out_of_memory.h"
#include "tandem/error.h"

namespace tandem {
namespace {

std::vector<uint64_t> numbers_in(const std::vector<std::byte>& blob) {
  std::vector<uint64_t> numbers(blob.size() / sizeof(uint64_t));
  if (!numbers.empty()) std::memcpy(numbers.data(), blob.data(), numbers.size() * sizeof(uint64_t));
  return numbers;
}

}  // namespace

std::string first_failure(const Blobs& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    return fmt::format(
        "rank {}: {}", rank,
        std::string_view(reinterpret_cast<const char*>(texts[rank].data()), texts[rank].size()));
  }
  return {};
}

std::string failure_of(const std::function<void()>& step) {
  try {
    step();
  } catch (const Error& error) {
    return error.what();
  } catch (const OutOfMemory& error) {
    return fmt::format("not enough memory ({})", error.what());
  } catch (const std::bad_alloc&) {
    return "not enough memory";
  }
  return {};
}

void agree_on(Communicator& comm, std::string_view what, const std::function<void()>& step) {
  std::string failure = failure_of(step);
  if (!failure.empty()) failure = fmt::format("{}: {}", what, failure);
  const auto texts = comm.exchange(std::as_bytes(std::span(failure)), what);
  if (const std::string first = first_failure(texts); !first.empty()) throw AgreedError(first);
}

std::vector<uint64_t> in_all(const Blobs& numbers) {
  if (numbers.empty()) return {};
  std::vector<uint64_t> common = numbers_in(numbers.front());
  for (const auto& blob : numbers) {
    const std::vector<uint64_t> remote = numbers_in(blob);
    std::vector<uint64_t> both;
    std::set_intersection(common.begin(), common.end(), remote.begin(), remote.end(),
                          std::back_inserter(both));
    common = std::move(both);
  }
  return common;
}

}  // namespace tandem
