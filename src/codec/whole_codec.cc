#include "codec/whole_codec.h"

#include "codec/lossless.h"

namespace tandem::codec {
namespace {

std::vector<WholeCodec>& all() {
  static std::vector<WholeCodec> codecs{{"lossless", require_lossless, max_lossless_bytes,
                                         lossless_bits, encode_lossless, decode_lossless}};
  return codecs;
}

}  // namespace

const std::vector<WholeCodec>& whole_codecs() {
  return all();
}

const WholeCodec* find_whole_codec(Codec codec) {
  const int number = int(codec) - int(Codec::lossless);
  return number < 0 || number >= int(all().size()) ? nullptr : &all()[size_t(number)];
}

Codec add_whole_codec(const WholeCodec& codec) {
  all().push_back(codec);
  return Codec(int(Codec::lossless) + int(all().size()) - 1);
}

}  // namespace tandem::codec
