#include "engine/notice.h"

#include <algorithm>
#include <cstring>

namespace ddl {
namespace {

struct Fixed {
    uint32_t magic, kind, comm, arrived;
    uint64_t birth, sequence;
    int32_t code;
    uint32_t text_bytes;
    Header call;
};
constexpr size_t kMostText = kNoticeBytes - sizeof(Fixed);

}  // namespace

void send_notice(Transport& transport, const std::vector<int>& ranks, const NoticeContent& content) {
    const size_t text_bytes = std::min(content.text.size(), kMostText);
    Fixed fixed{};
    fixed.magic = kHeaderMagic;
    fixed.kind = static_cast<uint32_t>(content.kind);
    fixed.comm = content.comm;
    fixed.birth = content.birth;
    fixed.arrived = content.arrived;
    fixed.sequence = content.sequence;
    fixed.code = content.code;
    fixed.text_bytes = static_cast<uint32_t>(text_bytes);
    fixed.call = content.call;
    std::byte bytes[kNoticeBytes];
    std::memcpy(bytes, &fixed, sizeof fixed);
    std::memcpy(bytes + sizeof fixed, content.text.data(), text_bytes);
    transport.tell(ranks, bytes, sizeof fixed + text_bytes);
}

bool read_notice(const Notice& notice, NoticeContent* content) {
    Fixed fixed{};
    if (notice.content.size() < sizeof fixed) return false;
    std::memcpy(&fixed, notice.content.data(), sizeof fixed);
    if (fixed.magic != kHeaderMagic || notice.content.size() < sizeof fixed + fixed.text_bytes) return false;
    content->kind = static_cast<NoticeKind>(fixed.kind);
    content->comm = fixed.comm;
    content->birth = fixed.birth;
    content->arrived = fixed.arrived;
    content->sequence = fixed.sequence;
    content->code = fixed.code;
    content->call = fixed.call;
    content->text.assign(reinterpret_cast<const char*>(notice.content.data() + sizeof fixed), fixed.text_bytes);
    return true;
}

}  // namespace ddl
