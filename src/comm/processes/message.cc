#include "comm/processes/message.h"

#include <xxhash.h>

namespace tandem::processes {
namespace {

uint64_t hash_fields(const Header& header) {
  return XXH3_64bits(&header, offsetof(Header, header_hash));
}

}  // namespace

void seal(Header& header) {
  header.header_hash = hash_fields(header);
}

bool is_sealed(const Header& header) {
  return header.header_hash == hash_fields(header);
}

}  // namespace tandem::processes
